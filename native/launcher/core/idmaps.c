/* User namespaces that only map ids, and the volumes that need one: root inside is mapped to their owner on disk, never to the host's
 * root. See docs/decisions/0080-writable-volumes.md. */
#include <asm/statfs.h>
#include <linux/magic.h>
#include <linux/poll.h>

#include "core.h"

static void add_line(struct text *text, unsigned long inside, unsigned long outside, unsigned long count)
{
    add_number(text, inside);
    add(text, " ");
    add_number(text, outside);
    add(text, " ");
    add_number(text, count);
    add(text, "\n");
}

/* Map the sandbox's id FIRST (its root) to OWNER on disk, and its other ids to those from OTHERS on, which no user of the host has.
 * No other ids are mapped. A map is one-to-one, so an owner that is itself among OTHERS is not mapped twice. */
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

static int maker; /* a pidfd of the process that makes a namespace */

/* Keep a new user namespace alive, which exists as long as a process or a descriptor refers to it. This process waits until it is
 * killed or its maker has ended. */
static _Noreturn void wait_to_be_mapped(void)
{
    struct pollfd end = {.fd = maker, .events = POLLIN};
    CALL(ppoll, &end, 1, NULL, NULL, 0);
    for (;;)
        CALL(exit_group, 0);
}

int mapped_namespace(struct worker *worker, const char *users, const char *groups)
{
    struct clone_args arguments = {.flags = CLONE_NEWUSER, .exit_signal = CHILD_SIGNAL};
    long self = CALL(getpid);
    maker = (int)need(worker, CALL(pidfd_open, self, 0));
    unsigned long pid = (unsigned long)need(worker, start_process(&arguments, sizeof arguments, wait_to_be_mapped));
    write_file(worker, proc_path(pid, "uid_map").bytes, users);
    write_file(worker, proc_path(pid, "gid_map").bytes, groups);
    int fd = (int)need(worker, CALL(openat, AT_FDCWD, proc_path(pid, "ns/user").bytes, O_RDONLY | O_CLOEXEC, 0));
    CALL(kill, pid, KILL_SIGNAL);
    CALL(wait4, pid, NULL, 0, NULL);
    CALL(close, maker);
    return fd;
}

/* Refuse a volume that is on an overlay. With gVisor, the supervisor of set-id bits cannot tell mounts apart and would take its files
 * for the sandbox's own. */
static void refuse_overlay(struct worker *worker, int volume)
{
    struct statfs found = {0};
    need(worker, CALL(fstatfs, volume, &found));
    if (found.f_type == OVERLAYFS_SUPER_MAGIC)
        worker->give_up(worker, EOPNOTSUPP);
}

/* Return a detached mount of SOURCE. The path is opened once, and only the descriptor is examined, because the path may change. */
int clone_volume(struct worker *worker, const char *source, const char *flags, const struct volume_ids *ids)
{
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS};
    int found = (int)need(worker, CALL(openat2, AT_FDCWD, source, &how, sizeof how));
    struct statx info;
    need(worker, CALL(statx, found, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_UID | STATX_GID, &info));
    if (info.stx_uid == 0 || info.stx_gid == 0)
        worker->give_up(worker, EPERM);
    if (has_flag(flags, "nooverlay"))
        refuse_overlay(worker, found);
    struct text users = owner_map(info.stx_uid, ids), groups = owner_map(info.stx_gid, ids);
    int namespace = mapped_namespace(worker, users.bytes, groups.bytes);
    int tree = clone_tree(worker, found, "", AT_EMPTY_PATH, attribute_flags(flags), namespace);
    CALL(close, namespace);
    CALL(close, found);
    return tree;
}
