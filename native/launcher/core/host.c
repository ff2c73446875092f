/* Operations that need the rights of the host's root, or those in an ordinary user's own namespace. They never resolve a path of the
 * image. The mounts get a number here and are attached later. */
#include "core.h"

enum { INTERNET = 2 /* AF_INET */, DATAGRAM = 2 /* SOCK_DGRAM */, SET_INTERFACE_FLAGS = 0x8914, UP_AND_RUNNING = 0x41 };

/* Change a setting of the network namespace. This mounts a new /proc if possible, which only the host's root can do: in the host's
 * /proc, the settings of all network namespaces are in one list, whose length grows with the number of sandboxes. */
static void set(struct worker *worker, const char *name, const char *value)
{
    static int proc = -1;
    if (proc < 0) {
        int context = (int)CALL(fsopen, "proc", FSOPEN_CLOEXEC);
        if (context >= 0 && CALL(fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
            proc = (int)CALL(fsmount, context, FSMOUNT_CLOEXEC, 0);
        CALL(close, context);
    }
    if (proc < 0)
        proc = (int)need(worker, CALL(openat, AT_FDCWD, "/proc", O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
    int fd = (int)need(worker, CALL(openat, proc, name, O_WRONLY | O_CLOEXEC, 0));
    write_text(worker, fd, value);
    CALL(close, fd);
}

static void loopback_up(struct worker *worker)
{
    struct { /* struct ifreq */
        char name[16];
        short flags;
        char rest[22];
    } request = {.name = "lo", .flags = UP_AND_RUNNING};
    int fd = (int)need(worker, CALL(socket, INTERNET, DATAGRAM | O_CLOEXEC, 0));
    need(worker, CALL(ioctl, fd, SET_INTERFACE_FLAGS, &request));
    CALL(close, fd);
}

/* Create a tmpfs with an empty file and an empty directory, which are used to cover others. They belong to their creator, the host's
 * root if possible, so nothing inside can change them. */
static int new_stage(struct worker *worker)
{
    char options[] = "size=1m,mode=777";
    int stage = new_filesystem(worker, "tmpfs", attribute_flags("nosuid,nodev"), options);
    need(worker, CALL(mknodat, stage, "null", S_IFREG | 0444, 0));
    need(worker, CALL(mkdirat, stage, "null-directory", 0555));
    need(worker, CALL(mkdirat, stage, "proc", 0755));
    need(worker, CALL(mkdirat, stage, "sys", 0755));
    return stage;
}

static int new_devices(struct worker *worker) /* FLAGS OPTIONS OWNER NODES LINKS … */
{
    char *flags = next_word(worker), *options = next_word(worker);
    unsigned long owner = next_number(worker), nodes = next_number(worker), links = next_number(worker);
    int directory = new_filesystem(worker, "tmpfs", attribute_flags(flags), options);
    while (nodes--) { /* NAME MAJOR MINOR */
        const char *name = next_subject(worker);
        unsigned long major = next_number(worker), minor = next_number(worker);
        need(worker, CALL(mknodat, directory, name, S_IFCHR | 0666, major << 8 | minor));
        need(worker, CALL(fchownat, directory, name, owner, owner, AT_SYMLINK_NOFOLLOW));
    }
    while (links--) { /* NAME TARGET */
        const char *name = next_subject(worker);
        need(worker, CALL(symlinkat, next_word(worker), directory, name));
        need(worker, CALL(fchownat, directory, name, owner, owner, AT_SYMLINK_NOFOLLOW));
    }
    return directory;
}

static int clone(struct worker *worker, const char *source, const char *flags, int userns)
{
    /* A user who may write to a directory of the path could place a link there that leads anywhere. */
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = has_flag(flags, "nolinks") ? RESOLVE_NO_SYMLINKS : 0};
    int found = (int)need(worker, CALL(openat2, AT_FDCWD, source, &how, sizeof how));
    int tree = clone_tree(worker, found, "", AT_EMPTY_PATH, attribute_flags(flags), has_flag(flags, "mapped") ? userns : -1);
    CALL(close, found);
    return tree;
}

static bool mount_operation(struct worker *worker, const char *op, int userns)
{
    if (!strcmp(op, "clone")) { /* clone SOURCE SLOT FLAGS: a tree of the host; `mapped`: with its ids mapped for the sandbox */
        const char *source = next_subject(worker);
        unsigned long slot = next_number(worker);
        publish(worker, slot, clone(worker, source, next_word(worker), userns));
    } else if (!strcmp(op, "volume")) { /* volume SOURCE SLOT FLAGS FIRST COUNT OTHERS: a tree that the sandbox may write to */
        const char *source = next_subject(worker);
        unsigned long slot = next_number(worker);
        char *flags = next_word(worker);
        struct volume_ids ids = {.first = next_number(worker)};
        ids.count = next_number(worker);
        ids.others = next_number(worker);
        publish(worker, slot, clone_volume(worker, source, flags, &ids));
    } else if (!strcmp(op, "filesystem")) { /* filesystem TYPE SLOT FLAGS OPTIONS */
        const char *type = next_subject(worker);
        unsigned long slot = next_number(worker);
        char *flags = next_word(worker);
        publish(worker, slot, new_filesystem(worker, type, attribute_flags(flags), next_word(worker)));
    } else if (!strcmp(op, "devices")) { /* devices SLOT FLAGS OPTIONS OWNER NODES LINKS … */
        unsigned long slot = next_number(worker);
        publish(worker, slot, new_devices(worker));
    } else if (!strcmp(op, "stage")) { /* stage SLOT */
        unsigned long slot = next_number(worker);
        publish(worker, slot, new_stage(worker));
    } else {
        return false;
    }
    return true;
}

bool host_operation(struct worker *worker, const char *op, int userns)
{
    if (!strcmp(op, "unshare")) { /* unshare FLAGS: a new mount namespace is private, so its mounts do not propagate */
        unsigned long flags = next_number(worker);
        need(worker, CALL(unshare, flags));
        if (flags & CLONE_NEWNS)
            need(worker, CALL(mount, NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
    } else if (!strcmp(op, "hostname")) {
        const char *name = next_subject(worker);
        need(worker, CALL(sethostname, name, strlen(name)));
    } else if (!strcmp(op, "loopback")) {
        loopback_up(worker);
    } else if (!strcmp(op, "set")) { /* set NAME VALUE: below /proc */
        const char *name = next_subject(worker);
        set(worker, name, next_word(worker));
    } else {
        return mount_operation(worker, op, userns);
    }
    return true;
}
