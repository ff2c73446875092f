/* The identity of the caller, read while it waits. The result may be used only after checking that it still waits. */
#include <linux/nsfs.h>
#include <linux/prctl.h>

#include "supervisor.h"

enum { MAX_STATUS = 1 << 16, FIELDS = 5 };

static int open_below(int directory, const char *name, int flags)
{
    return (int)CALL(openat, directory, name, flags | O_CLOEXEC, 0);
}

long open_caller(struct caller *caller, uint32_t pid)
{
    caller->proc = open_below(AT_FDCWD, proc_path(pid, "").bytes, O_PATH | O_DIRECTORY);
    caller->root = open_below(caller->proc, "root", O_PATH | O_DIRECTORY);
    caller->cwd = open_below(caller->proc, "cwd", O_PATH | O_DIRECTORY);
    caller->memory = open_below(caller->proc, "mem", O_RDONLY);
    caller->userns = open_below(caller->proc, "ns/user", O_RDONLY);
    caller->network = open_below(caller->proc, "ns/net", O_RDONLY);
    caller->ipc = open_below(caller->proc, "ns/ipc", O_RDONLY);
    bool found = caller->proc >= 0 && caller->root >= 0 && caller->cwd >= 0 && caller->memory >= 0 && caller->userns >= 0;
    return found && caller->network >= 0 && caller->ipc >= 0 ? 0 : -ESRCH;
}

/* Parse the next number of a line, after blanks. */
static bool number(const char **at, unsigned base, unsigned long *value)
{
    while (**at == ' ' || **at == '\t')
        ++*at;
    return parse_number(at, base, value);
}

/* Return whether this is the line NAME, and move AT behind the name. */
static bool is_line(const char **at, const char *name)
{
    const char *rest = *at;
    while (*name && *rest == *name)
        rest++, name++;
    if (*name)
        return false;
    *at = rest;
    return true;
}

/* Parse the fourth id of a line: after the real, effective and saved ids, the one for file access. */
static bool fourth(const char *at, unsigned *id)
{
    unsigned long value = 0;
    for (int i = 0; i < 4; i++)
        if (!number(&at, 10, &value))
            return false;
    *id = (unsigned)value;
    return true;
}

static bool read_groups(const char *at, struct caller *caller)
{
    unsigned long group;
    for (caller->group_count = 0; number(&at, 10, &group); caller->group_count++) {
        if (caller->group_count == MAX_CALLER_GROUPS)
            return false;
        caller->groups[caller->group_count] = (unsigned)group;
    }
    return true;
}

/* Read the caller's ids, as numbers of the current user namespace. */
static long read_identity(struct caller *caller)
{
    static char text[MAX_STATUS];
    int fd = open_below(caller->proc, "status", O_RDONLY), found = 0;
    long length = fd < 0 ? fd : CALL(read, fd, text, sizeof text - 1);
    if (length <= 0)
        return -ESRCH;
    CALL(close, fd);
    text[length] = '\0';
    for (const char *line = text; *line; line += *line == '\n') {
        unsigned long value = 0;
        const char *at = line;
        if (is_line(&at, "Umask:")) {
            found += number(&at, 8, &value);
            caller->umask = (unsigned)value;
        } else if (is_line(&at, "Uid:")) {
            found += fourth(at, &caller->uid);
        } else if (is_line(&at, "Gid:")) {
            found += fourth(at, &caller->gid);
        } else if (is_line(&at, "CapEff:")) {
            found += number(&at, 16, &value);
            caller->capabilities = value;
        } else if (is_line(&at, "Groups:")) {
            found += read_groups(at, caller);
        }
        while (*line && *line != '\n')
            line++;
    }
    return found == FIELDS ? 0 : -EPERM;
}

/* Join a namespace. An ordinary user may do so only after joining the user namespace that owns it. */
static long enter(int namespace)
{
    long error = CALL(setns, namespace, 0);
    if (error != -EPERM)
        return error;
    long owner = CALL(ioctl, namespace, NS_GET_USERNS, 0);
    if (owner < 0 || CALL(setns, owner, CLONE_NEWUSER) < 0)
        return -EPERM;
    return CALL(setns, namespace, 0);
}

static long take_groups(const struct caller *caller)
{
    return CALL(setgroups, caller->group_count, caller->groups);
}

static long stand_where_it_does(const struct caller *caller)
{
    long error = CALL(fchdir, caller->root);
    error = error < 0 ? error : CALL(chroot, ".");
    return error < 0 ? error : CALL(fchdir, caller->cwd);
}

/* Become the caller, with its rights and no more. */
long become(struct caller *caller)
{
    /* As root, change the groups before joining the user namespace, which may forbid it. An ordinary user can change them only there,
     * and not at all if it has a single id; then all processes have that user's groups. */
    bool ordinary = CALL(geteuid) != 0;
    if (!ordinary && (read_identity(caller) < 0 || take_groups(caller) < 0))
        return -EPERM;
    if (enter(caller->network) < 0 || enter(caller->ipc) < 0 || CALL(setns, caller->userns, CLONE_NEWUSER) < 0)
        return -EPERM;
    if (read_identity(caller) < 0)
        return -EPERM;
    if (ordinary) {
        long error = take_groups(caller);
        if (error < 0 && error != -EPERM)
            return error;
    }
    if (stand_where_it_does(caller) < 0)
        return -EPERM;
    CALL(umask, caller->umask);
    if (CALL(prctl, PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || CALL(setresgid, caller->gid, caller->gid, caller->gid) < 0 ||
        CALL(setresuid, caller->uid, caller->uid, caller->uid) < 0 || set_capabilities(caller->capabilities) < 0)
        return -EPERM;
    return CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}
