/* Reading the arguments of an intercepted system call, and carrying it out. */
#include <asm/statfs.h>
#include <linux/magic.h>

#include "supervisor.h"

#ifndef __NR_fchmodat2
#define __NR_fchmodat2 452
#endif
enum { SET_ID = S_ISUID | S_ISGID, TRIES = 8 };

static long read_path(const struct caller *caller, struct call *call, uint64_t address)
{
    long length = CALL(pread64, caller->memory, call->path, sizeof call->path, address);
    for (long i = 0; i < length; i++)
        if (!call->path[i])
            return 0;
    return length == sizeof call->path ? -ENAMETOOLONG : -EFAULT;
}

static int open_fd(const struct caller *caller, uint64_t number)
{
    struct text name = {.length = 0};
    if ((int)number == AT_FDCWD)
        return AT_FDCWD;
    if ((int)number < 0)
        return -EBADF;
    add(&name, "fd/");
    add_number(&name, (unsigned)number);
    int fd = (int)CALL(openat, caller->proc, name.bytes, O_PATH | O_CLOEXEC, 0);
    return fd < 0 ? -EBADF : fd;
}

/* Resolve paths such as /proc/self/fd/N, which would mean this process's descriptors here. C libraries without fchmodat2 use them. */
static long through_descriptor(const struct caller *caller, struct call *call)
{
    static const char *const places[] = {"/proc/self/fd/", "/proc/thread-self/fd/"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *at = call->path, *place = places[i];
        unsigned long number;
        while (*place && *at == *place)
            at++, place++;
        if (*place || !parse_number(&at, 10, &number) || *at || number > 999999999)
            continue;
        call->at = open_fd(caller, number);
        call->on_file = true;
        return call->at < 0 ? call->at : 0;
    }
    return 0;
}

/* Read the arguments of the call, whose positions depend on the call. Negative: not a call that is handled here. */
static long read_arguments(const struct seccomp_notif *asked, struct call *call, uint64_t *at, uint64_t *path)
{
    const uint64_t *argument = (const uint64_t *)asked->data.args;
    switch (asked->data.nr) {
#ifdef __NR_chmod
    case __NR_chmod: *path = argument[0], call->mode = (unsigned)argument[1]; break;
    case __NR_creat:
        call->makes = true, *path = argument[0], call->mode = (unsigned)argument[1], call->flags = O_CREAT | O_WRONLY | O_TRUNC;
        break;
    case __NR_open:
        call->makes = true, *path = argument[0], call->flags = (int)argument[1], call->mode = (unsigned)argument[2];
        break;
#endif
    case __NR_fchmod: call->on_file = true, *at = argument[0], call->mode = (unsigned)argument[1]; break;
    case __NR_fchmodat: *at = argument[0], *path = argument[1], call->mode = (unsigned)argument[2]; break;
    case __NR_fchmodat2:
        *at = argument[0], *path = argument[1], call->mode = (unsigned)argument[2], call->flags = (int)argument[3];
        if (call->flags & ~(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
            return -EINVAL;
        break;
    case __NR_openat:
        call->makes = true, *at = argument[0], *path = argument[1];
        call->flags = (int)argument[2], call->mode = (unsigned)argument[3];
        break;
    default: return -ENOSYS;
    }
    call->mode &= 07777;
    return 0;
}

long understand(const struct caller *caller, const struct seccomp_notif *asked, struct call *call)
{
    uint64_t path = 0, at = (uint64_t)AT_FDCWD;
    long error;
    call->id = asked->id;
    if ((error = read_arguments(asked, call, &at, &path)) < 0)
        return error;
    if (!call->on_file && (error = read_path(caller, call, path)) < 0)
        return error;
    if (call->on_file || call->path[0] != '/') {
        call->at = open_fd(caller, at);
        if (call->at < 0 && call->at != AT_FDCWD)
            return call->at;
    } else if (!call->makes && (error = through_descriptor(caller, call)) < 0) {
        return error;
    }
    if (!call->makes && !call->on_file && !call->path[0] && call->flags & AT_EMPTY_PATH) {
        call->on_file = call->at != AT_FDCWD;
        if (!call->on_file)
            memcpy(call->path, ".", 2);
    }
    return 0;
}

/* -- carrying out the call -- */

static uint64_t mount_of(int fd)
{
    struct statx found = {0};
    long error = CALL(statx, fd, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_MNT_ID, &found);
    return error == 0 && found.stx_mask & STATX_MNT_ID ? found.stx_mnt_id : 0;
}

/* Return whether the file belongs to the sandbox itself, in the overlay that is its root; false if unsure. gVisor uses descriptors of
 * several mount namespaces, in which mounts have other numbers; with gVisor, volumes are never on an overlay. */
static bool is_own(int fd, const struct place *place)
{
    struct statfs info = {0};
    if (CALL(fstatfs, fd, &info) < 0 || info.f_type != OVERLAYFS_SUPER_MAGIC)
        return false;
    uint64_t mount = mount_of(fd);
    return place->with_virtual_kernel || (mount && mount == mount_of(place->root));
}

static long mode_of(int fd)
{
    struct statx info = {0};
    long error = CALL(statx, fd, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_MODE, &info);
    return error < 0 ? error : info.stx_mode;
}

static long set_mode(int fd, const struct place *place, unsigned mode)
{
    struct text name = {.length = 0};
    long now = mode_of(fd);
    if (now < 0)
        return now;
    if (!is_own(fd, place)) /* for a directory, set-gid only determines the group of new files, which is harmless */
        mode &= ~(unsigned)((now & S_IFMT) == S_IFDIR ? S_ISUID : SET_ID);
    add_number(&name, (unsigned)fd);
    return CALL(fchmodat, place->answers, name.bytes, mode);
}

static long change_mode(const struct call *call, const struct place *place)
{
    int fd = call->at;
    if (!call->on_file)
        fd = (int)CALL(openat, call->at, call->path, O_PATH | O_CLOEXEC | (call->flags & AT_SYMLINK_NOFOLLOW ? O_NOFOLLOW : 0), 0);
    return fd < 0 ? fd : set_mode(fd, place, call->mode);
}

/* Open without blocking, first as a new file, to know whether this call created it and so sets its mode. */
static long make_file(const struct call *call, const struct place *place)
{
    int flags = call->flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    unsigned plain = call->mode & ~(unsigned)SET_ID;
    bool is_new = false;
    long fd = -ENOENT;
    if (flags & O_PATH) /* O_PATH never creates a file, and such a descriptor cannot be passed on */
        return -EINVAL;
    for (int i = 0; fd < 0 && i < TRIES; i++) {
        is_new = true;
        fd = CALL(openat, call->at, call->path, (flags & O_TMPFILE) == O_TMPFILE ? flags : flags | O_EXCL, plain);
        if (fd >= 0 || fd != -EEXIST || flags & O_EXCL)
            break;
        is_new = false;
        fd = CALL(openat, call->at, call->path, flags & ~O_CREAT, 0);
        if (fd < 0 && fd != -ENOENT)
            break;
    }
    if (fd < 0)
        return fd;
    long mode = is_new ? mode_of((int)fd) : -1, error;
    if (mode >= 0 && (error = set_mode((int)fd, place, ((unsigned)mode & 0777) | (call->mode & 07000))) < 0)
        return error;
    long status = CALL(fcntl, fd, F_GETFL, 0);
    if (!(call->flags & O_NONBLOCK))
        CALL(fcntl, fd, F_SETFL, status & ~O_NONBLOCK);
    return fd;
}

long carry_out(const struct call *call, const struct place *place)
{
    return call->makes ? make_file(call, place) : change_mode(call, place);
}
