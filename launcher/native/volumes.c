/* Volumes that the sandbox may write to: root inside is their owner on the disk, and never the host's root. See
 * docs/decisions/0080-writable-volumes.md. */
#include <linux/fcntl.h>
#include <linux/openat2.h>
#include <linux/poll.h>
#include <linux/sched.h>
#include <linux/stat.h>

#include "native.h"

enum { O_PATH_ = 010000000, O_CLOEXEC_ = 02000000, SIGKILL_ = 9, SIGCHLD_ = 17, LONGEST_MAP = 256 };

struct text {
    char bytes[LONGEST_MAP];
    size_t length;
};

static void add(struct text *text, const char *more)
{
    while (*more && text->length < sizeof text->bytes - 1)
        text->bytes[text->length++] = *more++;
    text->bytes[text->length] = '\0';
}

static void add_number(struct text *text, unsigned long number)
{
    char digits[24], *digit = digits + sizeof digits;
    *--digit = '\0';
    do
        *--digit = (char)('0' + number % 10);
    while (number /= 10);
    add(text, digit);
}

static void add_line(struct text *text, unsigned long inside, unsigned long outside, unsigned long count)
{
    add_number(text, inside);
    add(text, " ");
    add_number(text, outside);
    add(text, " ");
    add_number(text, count);
    add(text, "\n");
}

/* The sandbox's id FIRST (its root) is what OWNER is on the disk, the others are the ids from OTHERS on, which no user of the host
 * has; nobody inside is anybody else. A map is one to one, so an owner among OTHERS has no second meaning. */
static struct text owner_map(unsigned long owner, const struct volume_ids *ids)
{
    struct text map = {.length = 0};
    unsigned long gap = owner > ids->others && owner - ids->others < ids->count ? owner - ids->others : 0;
    add_line(&map, owner, ids->first, 1);
    if (gap > 1)
        add_line(&map, ids->others + 1, ids->first + 1, gap - 1);
    if (gap + 1 < ids->count)
        add_line(&map, ids->others + gap + 1, ids->first + gap + 1, ids->count - gap - 1);
    return map;
}

/* A user namespace lives as long as a process or a descriptor of it. This one waits until it is killed, or its maker has ended. */
static _Noreturn void wait_to_be_mapped(void)
{
    struct pollfd launcher = {.fd = shared.launcher, .events = POLLIN};
    CALL(ppoll, &launcher, 1, NULL, NULL, 0);
    for (;;)
        CALL(exit_group, 0);
}

static void write_map(struct worker *worker, unsigned long pid, const char *name, const struct text *map)
{
    struct text path = {.length = 0};
    add(&path, "/proc/");
    add_number(&path, pid);
    add(&path, name);
    int fd = (int)need(worker, CALL(openat, AT_FDCWD, path.bytes, O_WRONLY | O_CLOEXEC_, 0));
    need(worker, CALL(write, fd, map->bytes, map->length));
    CALL(close, fd);
}

static int mapped_namespace(struct worker *worker, const struct text *users, const struct text *groups)
{
    struct clone_args arguments = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD_};
    unsigned long pid = (unsigned long)need(worker, start_process(&arguments, sizeof arguments, wait_to_be_mapped));
    write_map(worker, pid, "/uid_map", users);
    write_map(worker, pid, "/gid_map", groups);
    struct text path = {.length = 0};
    add(&path, "/proc/");
    add_number(&path, pid);
    add(&path, "/ns/user");
    int fd = (int)need(worker, CALL(openat, AT_FDCWD, path.bytes, O_RDONLY | O_CLOEXEC_, 0));
    CALL(kill, pid, SIGKILL_);
    CALL(wait4, pid, NULL, 0, NULL);
    return fd;
}

/* The detached mount of SOURCE. Only what was opened is looked at: its path may lead elsewhere a moment later. */
int clone_volume(struct worker *worker, const char *source, const char *flags, const struct volume_ids *ids)
{
    struct open_how how = {.flags = O_PATH_ | O_CLOEXEC_, .resolve = RESOLVE_NO_SYMLINKS};
    int found = (int)need(worker, CALL(openat2, AT_FDCWD, source, &how, sizeof how));
    struct statx info;
    need(worker, CALL(statx, found, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_UID | STATX_GID, &info));
    if (info.stx_uid == 0 || info.stx_gid == 0)
        worker->give_up(worker, EPERM);
    struct text users = owner_map(info.stx_uid, ids), groups = owner_map(info.stx_gid, ids);
    int namespace = mapped_namespace(worker, &users, &groups);
    int tree = clone_tree(worker, found, "", AT_EMPTY_PATH, attribute_flags(flags), namespace);
    CALL(close, namespace);
    CALL(close, found);
    return tree;
}
