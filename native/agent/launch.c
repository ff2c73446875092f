/* Launching: prepares everything that a new process needs from the fields of a START, because nothing may be allocated later. */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STACK_SIZE = 32 * 1024, MAX_STRINGS = 65536, MAX_ACCOUNT_FILE = 1 << 20 };

extern char **environ;

static void free_strings(char **strings)
{
    for (char **string = strings; string && *string; string++)
        free(*string);
    free(strings);
}

void launch_close(struct launch *launch)
{
    for (int i = 0; i < 4 && !launch->closed; i++)
        if (launch->fds[i] >= 0)
            close(launch->fds[i]);
    launch->closed = true;
}

void launch_release(struct launch *launch)
{
    free_strings(launch->argv);
    free_strings(launch->envp);
    free_strings(launch->programs);
    free(launch->cwd);
    if (launch->stack)
        munmap(launch->stack, launch->stack_size);
    launch_close(launch);
    launch->argv = launch->envp = launch->programs = NULL;
    launch->cwd = NULL;
    launch->stack = NULL;
}

static char *copy_text(const void *bytes, size_t length)
{
    if (length > MAX_ARG || memchr(bytes, 0, length)) {
        errno = EINVAL;
        return NULL;
    }
    char *text = malloc(length + 1);
    if (text) {
        memcpy(text, bytes, length);
        text[length] = 0;
    }
    return text;
}

static int append(char ***strings, size_t *count, char *text)
{
    if (!text)
        return -1;
    char **larger = *count < MAX_STRINGS ? realloc(*strings, (*count + 2) * sizeof *larger) : NULL;
    if (!larger) {
        free(text);
        errno = *count < MAX_STRINGS ? ENOMEM : E2BIG;
        return -1;
    }
    larger[(*count)++] = text;
    larger[*count] = NULL;
    *strings = larger;
    return 0;
}

static int prepare_arguments(struct launch *launch, struct fields fields)
{
    struct fields rest = fields;
    struct field field;
    size_t count = 0;
    if (fields_find(fields, TAG_SHELL, &field)) {
        const char *shell = access("/bin/bash", X_OK) == 0 ? "/bin/bash" : "/bin/sh";
        if (append(&launch->argv, &count, strdup(shell + strlen("/bin/"))) < 0 || append(&launch->argv, &count, strdup("-c")) < 0
            || append(&launch->argv, &count, copy_text(field.value, field.length)) < 0)
            return -1;
        count = 0;
        return append(&launch->programs, &count, strdup(shell));
    }
    while (fields_next(&rest, &field))
        if (field.tag == TAG_ARG && append(&launch->argv, &count, copy_text(field.value, field.length)) < 0)
            return -1;
    if (!count || !launch->argv[0][0]) {
        errno = EINVAL;
        return -1;
    }
    return 0;
}

static int set_variable(char ***strings, size_t *count, char *text)
{
    const char *equals = text ? strchr(text, '=') : NULL;
    if (!equals || equals == text) {
        if (text)
            errno = EINVAL;
        free(text);
        return -1;
    }
    size_t name = (size_t)(equals - text) + 1;
    for (size_t i = 0; i < *count; i++) {
        if (strncmp((*strings)[i], text, name) == 0) {
            free((*strings)[i]);
            (*strings)[i] = text;
            return 0;
        }
    }
    return append(strings, count, text);
}

static int set_pair(char ***strings, size_t *count, const char *name, const char *value)
{
    char *text;
    if (asprintf(&text, "%s=%s", name, value) < 0)
        return -1;
    return set_variable(strings, count, text);
}

/* --- users: read inside the sandbox, bounded, without any name service ----------------------------------------------- */

static char *read_account_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0)
        return NULL;
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode) || info.st_size > MAX_ACCOUNT_FILE) {
        close(fd);
        errno = EINVAL;
        return NULL;
    }
    char *text = malloc(MAX_ACCOUNT_FILE + 1);
    size_t length = 0;
    for (ssize_t got; text && length < MAX_ACCOUNT_FILE; length += (size_t)got)
        if ((got = read(fd, text + length, MAX_ACCOUNT_FILE - length)) <= 0)
            break;
    close(fd);
    if (text)
        text[length] = 0;
    return text;
}

static bool parse_id(const char *text, unsigned *id)
{
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    unsigned long value = strtoul(text, &end, 10);
    *id = (unsigned)value;
    return !*end && value < 0xffffffffu;
}

static bool is_number(const char *text)
{
    return *text && text[strspn(text, "0123456789")] == '\0';
}

/* Parse an id in plain decimal form, without leading zeros. */
static bool parse_wanted_id(const char *text, unsigned *id)
{
    return is_number(text) && (text[0] != '0' || !text[1]) && parse_id(text, id);
}

/* Find the account with this name or uid: name:password:uid:gid:comment:home:shell. A number is always a uid, because an image may
 * have an account whose name is a number and whose uid is a different one. */
static bool find_account(char *text, const char *wanted, char *words[7])
{
    unsigned uid = 0, found;
    bool by_uid = is_number(wanted);
    if (by_uid && !parse_wanted_id(wanted, &uid))
        return false;
    char *line_state;
    for (char *line = strtok_r(text, "\n", &line_state); line; line = strtok_r(NULL, "\n", &line_state)) {
        int count = 0;
        for (char *word; count < 7 && (word = strsep(&line, ":"));)
            words[count++] = word;
        if (count == 7 && (by_uid ? parse_id(words[2], &found) && found == uid : strcmp(words[0], wanted) == 0))
            return true;
    }
    return false;
}

bool account_uid(const char *name, uid_t *uid)
{
    char *text = read_account_file("/etc/passwd"), *words[7];
    unsigned id;
    bool found = text && find_account(text, name, words) && parse_id(words[2], &id);
    if (found)
        *uid = id;
    free(text);
    return found;
}

static void find_groups(struct launch *launch, const char *user)
{
    char *text = read_account_file("/etc/group"), *line_state;
    launch->groups[launch->group_count++] = launch->gid;
    for (char *line = text ? strtok_r(text, "\n", &line_state) : NULL; line; line = strtok_r(NULL, "\n", &line_state)) {
        char *words[4];
        unsigned id;
        int count = 0;
        for (char *word; count < 4 && (word = strsep(&line, ":"));)
            words[count++] = word;
        if (count != 4 || !parse_id(words[2], &id) || id == launch->gid)
            continue;
        for (char *member; (member = strsep(&words[3], ","));)
            if (strcmp(member, user) == 0 && launch->group_count < MAX_GROUPS)
                launch->groups[launch->group_count++] = id;
    }
    free(text);
}

/* Find the group with this name or number. A number need not be in the file. */
static int find_group(const char *wanted, unsigned *gid)
{
    if (is_number(wanted))
        return parse_wanted_id(wanted, gid) ? 0 : (errno = EINVAL, -1);
    char *text = read_account_file("/etc/group"), *line_state;
    int result = -1;
    for (char *line = text ? strtok_r(text, "\n", &line_state) : NULL; line && result < 0; line = strtok_r(NULL, "\n", &line_state)) {
        char *words[4];
        int count = 0;
        for (char *word; count < 4 && (word = strsep(&line, ":"));)
            words[count++] = word;
        if (count == 4 && strcmp(words[0], wanted) == 0 && parse_id(words[2], gid))
            result = 0;
    }
    free(text);
    if (result < 0)
        errno = EINVAL;
    return result;
}

/* With `clean`, as in a build: HOME is the only variable, and a user without an account has one too. */
static int prepare_user(struct launch *launch, char *wanted, size_t *count, bool clean)
{
    char *group = strchr(wanted, ':');
    unsigned id;
    if (!*wanted)
        return errno = EINVAL, -1;
    if (group)
        *group++ = 0;
    char *text = read_account_file("/etc/passwd"), *words[7];
    int result = -1;
    errno = EINVAL;
    if (text && find_account(text, wanted, words) && parse_id(words[2], &id)) {
        launch->uid = id;
        if (parse_id(words[3], &id)) {
            launch->gid = id;
            find_groups(launch, words[0]);
            result = set_pair(&launch->envp, count, "HOME", words[5]);
            if (result == 0 && !clean)
                result = set_pair(&launch->envp, count, "USER", words[0]);
            if (result == 0 && !clean)
                result = set_pair(&launch->envp, count, "LOGNAME", words[0]);
        }
    } else if (parse_wanted_id(wanted, &id)) {
        launch->uid = launch->gid = id;
        result = clean ? set_pair(&launch->envp, count, "HOME", "/") : 0;
    }
    free(text);
    if (result == 0 && group) {
        launch->group_count = 0;
        if (find_group(group, &id) < 0)
            return -1;
        launch->gid = id;
    }
    if (clean && !launch->group_count)
        launch->groups[launch->group_count++] = launch->gid;
    /* Without root, the user cannot be changed, and setting even the same ids may be forbidden. */
    launch->change_user = result == 0 && !(geteuid() && launch->uid == geteuid() && launch->gid == getegid());
    return result;
}

static int prepare_environment(struct launch *launch, struct fields fields)
{
    struct fields rest = fields;
    struct field field;
    size_t count = 0;
    bool clean = fields_number_or(fields, TAG_FLAGS, 0) & START_CLEAN;
    for (char **variable = environ; !clean && *variable; variable++)
        if (strchr(*variable, '=') > *variable && append(&launch->envp, &count, strdup(*variable)) < 0)
            return -1;
    if (fields_find(fields, TAG_USER, &field)) {
        char *user = copy_text(field.value, field.length);
        int result = user ? prepare_user(launch, user, &count, clean) : -1;
        free(user);
        if (result < 0)
            return -1;
    }
    while (fields_next(&rest, &field))
        if (field.tag == TAG_ENV && set_variable(&launch->envp, &count, copy_text(field.value, field.length)) < 0)
            return -1;
    if (!launch->envp)
        launch->envp = calloc(1, sizeof *launch->envp);
    return launch->envp ? 0 : -1;
}

/* List the paths at which to look for the program, like execvp, but with the PATH of the new process. */
static int prepare_programs(struct launch *launch)
{
    const char *name = launch->argv[0], *path = "/usr/local/bin:/usr/bin:/bin";
    size_t count = 0;
    if (launch->programs)
        return 0; /* a shell */
    if (strchr(name, '/'))
        return append(&launch->programs, &count, strdup(name));
    for (char **variable = launch->envp; *variable; variable++)
        if (strncmp(*variable, "PATH=", 5) == 0)
            path = *variable + 5;
    char *copy = strdup(path), *rest = copy;
    int result = copy ? 0 : -1;
    for (char *folder; result == 0 && (folder = strsep(&rest, ":"));) {
        char *program;
        if (asprintf(&program, "%s/%s", *folder ? folder : ".", name) < 0)
            program = NULL;
        result = append(&launch->programs, &count, program);
    }
    free(copy);
    return result;
}

static int prepare_rlimits(struct launch *launch, struct fields fields)
{
    struct field field;
    if (agent.raised_open_files) { /* the raised limit is for the agent only */
        launch->rlimits[0].resource = RLIMIT_NOFILE;
        launch->rlimits[launch->rlimit_count++].limit = agent.open_files;
    }
    while (fields_next(&fields, &field)) {
        if (field.tag != TAG_RLIMIT)
            continue;
        if (field.length != 24 || launch->rlimit_count == MAX_RLIMITS || get_u64(field.value) > 64)
            return errno = EINVAL, -1;
        size_t i = launch->rlimit_count++;
        launch->rlimits[i].resource = (int)get_u64(field.value);
        launch->rlimits[i].limit.rlim_cur = get_u64(field.value + 8);
        launch->rlimits[i].limit.rlim_max = get_u64(field.value + 16);
    }
    return 0;
}

int launch_prepare(struct launch *launch, struct fields fields)
{
    struct field field;
    for (int i = 0; i < 4; i++)
        launch->fds[i] = -1;
    if (prepare_arguments(launch, fields) < 0 || prepare_environment(launch, fields) < 0)
        return -1;
    if (prepare_programs(launch) < 0 || prepare_rlimits(launch, fields) < 0)
        return -1;
    launch->cwd = fields_find(fields, TAG_CWD, &field) ? copy_text(field.value, field.length) : strdup(agent.work_dir);
    if (!launch->cwd)
        return -1;
    launch->stack_size = STACK_SIZE;
    launch->stack = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (launch->stack == MAP_FAILED) {
        launch->stack = NULL;
        return -1;
    }
    return 0;
}
