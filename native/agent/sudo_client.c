/* The program `sudo` of a sandbox: asks the agent to run a command as root, or as another user (sudo.c).
 *
 * It has the options of sudo that programs and scripts use: -u, -E, -H, -i, -s, -n, -S, -v, -l, -k, --preserve-env, `VAR=value` and --.
 * There is never a password. The variables of the caller do not reach the command, but for those of the terminal and the language,
 * and those that are asked for.
 *
 * If standard input and output are terminals, the command gets a terminal of its own, and this program copies between the two, so
 * job control works as in the caller's shell. Otherwise the command has the caller's own descriptors. The signals that this program
 * receives are passed on, and its end ends the command.
 */
#define _GNU_SOURCE
#include "sudo.h"

#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define NOT_ALLOWED "this user may not become another one in this sandbox"
#define SECURE_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

extern char **environ;

struct wish {
    const char *user;
    bool keep_env, login, shell, check;
    const char *kept; /* names of --preserve-env, separated by commas */
    char **command;   /* variables first, then words */
};

struct request {
    uint8_t bytes[MOST_SUDO_BYTES];
    size_t length;
};

static const char usage[] =
    "usage: sudo [-EHinsSv] [-u USER] [--preserve-env[=NAMES]] [--] [VAR=value ...] COMMAND [ARGUMENT ...]\n";

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "sudo: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    exit(1);
}

/* --- the command line ----------------------------------------------------------------------------------------------------------- */

static bool is_long(struct wish *wish, const char *word, char ***rest)
{
    static const char user[] = "--user=", kept[] = "--preserve-env=";
    if (strncmp(word, user, sizeof user - 1) == 0)
        wish->user = word + sizeof user - 1;
    else if (strcmp(word, "--user") == 0 && (*rest)[1])
        wish->user = *++*rest;
    else if (strncmp(word, kept, sizeof kept - 1) == 0)
        wish->kept = word + sizeof kept - 1;
    else if (strcmp(word, "--preserve-env") == 0)
        wish->keep_env = true;
    else if (strcmp(word, "--login") == 0)
        wish->login = true;
    else if (strcmp(word, "--shell") == 0)
        wish->shell = true;
    else if (strcmp(word, "--validate") == 0 || strcmp(word, "--list") == 0)
        wish->check = true;
    else
        return strcmp(word, "--non-interactive") == 0 || strcmp(word, "--set-home") == 0 || strcmp(word, "--stdin") == 0;
    return true;
}

static void parse_letters(struct wish *wish, const char *letters, char ***rest)
{
    for (; *letters; letters++) {
        switch (*letters) {
        case 'E': wish->keep_env = true; break;
        case 'i': wish->login = true; break;
        case 's': wish->shell = true; break;
        case 'v':
        case 'l': wish->check = true; break;
        case 'k':
        case 'K': wish->check = true; break; /* there is nothing to forget */
        case 'n':
        case 'H':
        case 'S': break;
        case 'u':
        case 'p':
            if (!letters[1] && !(*rest)[1])
                fail("an option needs an argument", NULL);
            const char *value = letters[1] ? letters + 1 : *++*rest;
            if (*letters == 'u')
                wish->user = value;
            return;
        default: fprintf(stderr, "sudo: no such option: -%c\n%s", *letters, usage); exit(1);
        }
    }
}

static struct wish parse(char **argv)
{
    struct wish wish = {.user = "0"};
    char **word = argv + 1;
    for (; *word && (*word)[0] == '-' && (*word)[1]; word++) {
        if (strcmp(*word, "--") == 0) {
            word++;
            break;
        }
        if (strcmp(*word, "-h") == 0 || strcmp(*word, "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        }
        if (strcmp(*word, "-V") == 0 || strcmp(*word, "--version") == 0) {
            puts("sudo of Atoll");
            exit(0);
        }
        if ((*word)[1] != '-')
            parse_letters(&wish, *word + 1, &word);
        else if (!is_long(&wish, *word, &word)) {
            fprintf(stderr, "sudo: no such option: %s\n%s", *word, usage);
            exit(1);
        }
    }
    wish.command = word;
    if (wish.user[0] == '#')
        wish.user++;
    return wish;
}

static bool is_variable(const char *word)
{
    const char *equals = strchr(word, '=');
    return equals && equals != word && !memchr(word, '/', (size_t)(equals - word));
}

/* --- the request ---------------------------------------------------------------------------------------------------------------- */

static void add(struct request *request, unsigned tag, const char *text)
{
    size_t length = strlen(text);
    if (length + 6 > sizeof request->bytes - request->length)
        fail("the command and its variables are too long", NULL);
    uint8_t *at = request->bytes + request->length;
    put_u16(at, tag);
    put_u32(at + 2, (uint32_t)length);
    memcpy(at + 6, text, length);
    request->length += 6 + length;
}

static void add_variable(struct request *request, const char *name, const char *value)
{
    char *text;
    if (value && asprintf(&text, "%s=%s", name, value) >= 0) {
        add(request, TAG_ENV, text);
        free(text);
    }
}

static bool is_named(const char *names, const char *variable)
{
    size_t length = strcspn(variable, "=");
    while (names && *names) {
        size_t here = strcspn(names, ",");
        if (here == length && strncmp(names, variable, length) == 0)
            return true;
        names += here + (names[here] == ',');
    }
    return false;
}

static bool is_kept(const struct wish *wish, const char *variable)
{
    static const char always[] = "TERM,COLORTERM,LANG,LANGUAGE,TZ,DISPLAY,XAUTHORITY,NO_COLOR,DEBIAN_FRONTEND";
    static const char never[] = "PATH,HOME,USER,LOGNAME,SHELL,PWD,OLDPWD,_";
    if (is_named(never, variable))
        return is_named(wish->kept, variable);
    return wish->keep_env || is_named(always, variable) || strncmp(variable, "LC_", 3) == 0 || is_named(wish->kept, variable);
}

/* Return a field of the account in /etc/passwd: 5 is the home, 6 the shell. The memory is never released. */
static char *account(const char *user, int wanted)
{
    FILE *file = fopen("/etc/passwd", "re");
    char *line = NULL;
    size_t size = 0;
    while (file && getline(&line, &size, file) > 0) {
        char *rest = line, *words[7] = {NULL};
        line[strcspn(line, "\n")] = 0;
        for (int i = 0; i < 7; i++)
            words[i] = strsep(&rest, ":");
        if (words[6] && (strcmp(words[0], user) == 0 || strcmp(words[2], user) == 0)) {
            fclose(file);
            return words[wanted];
        }
    }
    if (file)
        fclose(file);
    return NULL;
}

/* Join words to a command line, with every character quoted that has a meaning for a shell. */
static char *quoted(char **words)
{
    size_t size = 1;
    for (char **word = words; *word; word++)
        size += 2 * strlen(*word) + 1;
    char *line = malloc(size), *at = line;
    for (char **word = words; line && *word; word++) {
        if (at != line)
            *at++ = ' ';
        for (const char *letter = *word; *letter; letter++) {
            bool plain = (*letter >= 'a' && *letter <= 'z') || (*letter >= 'A' && *letter <= 'Z') || (*letter >= '0' && *letter <= '9')
                         || strchr("_-$", *letter) || (unsigned char)*letter >= 0x80;
            if (!plain)
                *at++ = '\\';
            *at++ = *letter;
        }
    }
    if (!line)
        fail("no memory", NULL);
    *at = 0;
    return line;
}

static void add_words(struct request *request, const struct wish *wish, char **words)
{
    char *shell = account(wish->user, 6);
    if (wish->shell && getenv("SHELL"))
        shell = getenv("SHELL");
    if (!shell || !*shell)
        shell = "/bin/sh";
    if (!wish->login && !wish->shell) {
        for (; *words; words++)
            add(request, TAG_ARG, *words);
        return;
    }
    add(request, TAG_ARG, shell);
    if (wish->login)
        add(request, TAG_ARG, "-l");
    if (*words) {
        add(request, TAG_ARG, "-c");
        add(request, TAG_ARG, quoted(words));
    }
    add_variable(request, "SHELL", shell);
}

static void describe(struct request *request, const struct wish *wish, bool terminal)
{
    char cwd[PATH_MAX], number[24], **words = wish->command;
    const char *home = wish->login ? account(wish->user, 5) : NULL;
    add(request, TAG_USER, wish->user);
    add_variable(request, "PATH", SECURE_PATH);
    for (char **variable = environ; *variable; variable++)
        if (strchr(*variable, '=') > *variable && is_kept(wish, *variable))
            add(request, TAG_ENV, *variable);
    snprintf(number, sizeof number, "%u", getuid());
    const char *name = account(number, 0);
    add_variable(request, "SUDO_UID", number);
    add_variable(request, "SUDO_USER", name ? name : number);
    snprintf(number, sizeof number, "%u", getgid());
    add_variable(request, "SUDO_GID", number);
    for (; *words && is_variable(*words); words++)
        add(request, TAG_ENV, *words);
    if (*words)
        add_variable(request, "SUDO_COMMAND", *words);
    if (home && *home)
        add(request, TAG_CWD, home);
    else if (getcwd(cwd, sizeof cwd) && cwd[0] == '/')
        add(request, TAG_CWD, cwd);
    if (!wish->check && (*words || wish->login || wish->shell))
        add_words(request, wish, words);
    uint8_t flags[8];
    put_u64(flags, terminal ? START_PTY : 0);
    if (sizeof flags + 6 <= sizeof request->bytes - request->length) {
        uint8_t *at = request->bytes + request->length;
        put_u16(at, TAG_FLAGS);
        put_u32(at + 2, sizeof flags);
        memcpy(at + 6, flags, sizeof flags);
        request->length += 6 + sizeof flags;
    }
}

static bool send_all(int line, const void *bytes, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t part = send(line, (const uint8_t *)bytes + done, length - done, MSG_NOSIGNAL);
        if (part < 0 && errno != EINTR)
            return false;
        done += part > 0 ? (size_t)part : 0;
    }
    return true;
}

static bool send_request(int line, const struct request *request, const int fds[SUDO_FDS])
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(SUDO_FDS * sizeof(int))];
    } control = {.bytes = {0}};
    struct sudo_head head = {SUDO_MAGIC, (uint32_t)request->length};
    struct iovec part = {&head, sizeof head};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(SUDO_FDS * sizeof(int));
    memcpy(CMSG_DATA(rights), fds, SUDO_FDS * sizeof(int));
    return sendmsg(line, &message, MSG_NOSIGNAL) == sizeof head && send_all(line, request->bytes, request->length);
}

/* --- the caller's terminal, and one for the command ------------------------------------------------------------------------------- */

static struct termios before;
static bool is_raw;

static void put_back(void)
{
    if (is_raw)
        tcsetattr(0, TCSADRAIN, &before);
    is_raw = false;
}

static int open_pair(int *slave)
{
    struct winsize size;
    char path[64];
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || grantpt(master) < 0 || unlockpt(master) < 0 || ptsname_r(master, path, sizeof path) != 0)
        return -1;
    *slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*slave < 0 || tcgetattr(0, &before) < 0)
        return -1;
    tcsetattr(*slave, TCSANOW, &before);
    if (ioctl(0, TIOCGWINSZ, &size) == 0)
        ioctl(master, TIOCSWINSZ, &size);
    return master;
}

static void make_raw(void)
{
    struct termios raw = before;
    cfmakeraw(&raw);
    is_raw = tcsetattr(0, TCSADRAIN, &raw) == 0;
    atexit(put_back);
}

/* Returns false at the end of the input, or if it cannot be written. */
static bool copy_once(int from, int to)
{
    uint8_t bytes[16384];
    ssize_t length = read(from, bytes, sizeof bytes);
    if (length < 0 && errno == EINTR)
        return true;
    for (ssize_t done = 0; done < length;) {
        ssize_t part = write(to, bytes + done, (size_t)(length - done));
        if (part < 0 && errno != EINTR)
            return false;
        done += part > 0 ? part : 0;
    }
    return length > 0;
}

static void copy_rest(int master)
{
    struct pollfd output = {.fd = master, .events = POLLIN};
    while (poll(&output, 1, 50) > 0 && output.revents & POLLIN)
        if (!copy_once(master, 1))
            return;
}

/* --- waiting -------------------------------------------------------------------------------------------------------------------------- */

static int end_as(uint32_t status)
{
    put_back();
    if (WIFSIGNALED(status)) {
        int number = WTERMSIG(status);
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, number);
        signal(number, SIG_DFL);
        raise(number);
        sigprocmask(SIG_UNBLOCK, &one, NULL);
        return 128 + number;
    }
    return WEXITSTATUS(status);
}

static int conclude(const struct wish *wish, const struct sudo_reply *reply)
{
    char **word = wish->command;
    while (*word && is_variable(*word))
        word++;
    put_back();
    switch (reply->answer) {
    case SUDO_ENDED: return end_as(reply->number);
    case SUDO_ALLOWED: return 0;
    case SUDO_REFUSED: fprintf(stderr, "sudo: %s\n", NOT_ALLOWED); return 1;
    default:
        if (reply->number == ENOENT && *word)
            fprintf(stderr, "sudo: %s: command not found\n", *word);
        else if (reply->number == EINVAL)
            fprintf(stderr, "sudo: unknown user, or an invalid variable\n");
        else
            fprintf(stderr, "sudo: %s: %s\n", *word ? *word : "the command", strerror((int)reply->number));
        return 1;
    }
}

static int watch_signals(void)
{
    static const int passed[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGWINCH, SIGCONT};
    sigset_t mask;
    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
        sigaddset(&mask, passed[i]);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    return signalfd(-1, &mask, SFD_CLOEXEC);
}

static void pass_signal(int signals, int line, int master)
{
    struct signalfd_siginfo info;
    struct winsize size;
    if (read(signals, &info, sizeof info) != sizeof info)
        return;
    if (info.ssi_signo == SIGWINCH && master >= 0 && ioctl(0, TIOCGWINSZ, &size) == 0)
        ioctl(master, TIOCSWINSZ, &size);
    uint8_t number = (uint8_t)info.ssi_signo;
    send_all(line, &number, 1);
}

static int wait_for(const struct wish *wish, int line, int signals, int master)
{
    struct sudo_reply reply;
    size_t got = 0;
    struct pollfd ready[4] = {
        {.fd = line, .events = POLLIN},
        {.fd = signals, .events = POLLIN},
        {.fd = master, .events = POLLIN},
        {.fd = master >= 0 ? 0 : -1, .events = POLLIN},
    };
    for (;;) {
        if (poll(ready, 4, -1) < 0 && errno != EINTR)
            fail("poll", strerror(errno));
        if (ready[1].revents & POLLIN)
            pass_signal(signals, line, master);
        if (ready[2].revents && !copy_once(master, 1))
            ready[2].fd = -1;
        if (ready[3].revents && !copy_once(0, master))
            ready[3].fd = -1;
        if (!ready[0].revents)
            continue;
        ssize_t length = read(line, (uint8_t *)&reply + got, sizeof reply - got);
        if (length < 0 && errno == EINTR)
            continue;
        if (length <= 0) {
            put_back();
            fail("the agent of the sandbox ended the connection", NULL);
        }
        got += (size_t)length;
        if (got < sizeof reply)
            continue;
        if (ready[2].fd >= 0)
            copy_rest(master);
        return conclude(wish, &reply);
    }
}

/* Root needs nobody's help to become root. */
static void run_as_root(const struct wish *wish)
{
    char **words = wish->command;
    for (; *words && is_variable(*words); words++)
        putenv(*words);
    if (getuid() != 0 || wish->login || wish->shell || (strcmp(wish->user, "0") != 0 && strcmp(wish->user, "root") != 0))
        return;
    if (wish->check || !*words)
        exit(!wish->check);
    execvp(*words, words);
    fail(*words, errno == ENOENT ? "command not found" : strerror(errno));
}

int sudo_client(int argc, char **argv)
{
    static struct request request;
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SUDO_SOCKET};
    struct wish wish = parse(argv);
    int fds[SUDO_FDS] = {0, 1, 2}, slave = -1, master = -1;
    (void)argc;
    if (!wish.check && !wish.login && !wish.shell && !*wish.command) {
        fputs(usage, stderr);
        return 1;
    }
    for (int fd = 0; fd < SUDO_FDS; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            fail("/dev/null", strerror(errno));
    int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (line < 0 || connect(line, (struct sockaddr *)&address, sizeof address) < 0) {
        run_as_root(&wish);
        fail("this sandbox was made without the option 'sudo'", NULL);
    }
    if (!wish.check && isatty(0) && isatty(1))
        master = open_pair(&slave);
    if (master >= 0) {
        fds[0] = fds[1] = slave;
        fds[2] = isatty(2) ? slave : 2;
    }
    describe(&request, &wish, master >= 0);
    int signals = watch_signals();
    char ready;
    if (read(line, &ready, 1) != 1)
        fail(NOT_ALLOWED, NULL);
    if (signals < 0)
        fail("signals", strerror(errno));
    if (!send_request(line, &request, fds)) { /* it has hung up, perhaps with an answer */
        struct sudo_reply reply;
        return recv(line, &reply, sizeof reply, MSG_WAITALL) == sizeof reply ? conclude(&wish, &reply) : (fail(NOT_ALLOWED, NULL), 1);
    }
    if (master >= 0) {
        close(slave);
        make_raw();
    }
    return wait_for(&wish, line, signals, master);
}
