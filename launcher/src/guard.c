/*
 * atoll-mount supervise: decides about set-id bits for one sandbox that has a writable volume.
 *
 * Theory of operation
 *
 * A program that is set-uid in a volume is set-uid on the host. The filter of system calls cannot see where a path leads, so in a
 * sandbox with a writable volume it hands every call that would set such a bit (chmod and its family, open with O_CREAT) to this
 * process, which does it instead of the caller: with the bits on the sandbox's own files, without them everywhere else. The caller's
 * own call is never continued: another thread could change its path after we looked.
 *
 * Each call is made by a child of its own that first becomes the caller: it joins the caller's user namespace and takes over its root
 * directory, working directory, ids, groups, capabilities and umask. So it can do no more than the caller could, and follows no link
 * that the caller could not follow. It joins its network and IPC, too: what is below /proc/sys depends on who looks. It looks at what
 * it has opened, never at the path again. It is in no PID namespace of the sandbox, so nobody inside can name it.
 *
 * The listener comes over a socket, from whoever installs the filter; before it come the lists of the control groups to join, at once
 * and as soon as the listener is there: a runtime takes no group that somebody is in. When the last process under the filter is gone,
 * so is this one. If this one dies first, those calls fail: nothing is let through.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/nsfs.h>
#include <linux/seccomp.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guard.h"

#ifndef SECCOMP_ADDFD_FLAG_SEND
#define SECCOMP_ADDFD_FLAG_SEND (1UL << 1)
#endif
#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif
enum { OVERLAY = 0x794c7630, STATX_MOUNT_ID = 0x1000, MOUNT_ID_AT = 144, SECONDS = 5, MOST_GROUPS = 1024, TRIES = 8 };
enum { SET_ID = S_ISUID | S_ISGID };

static int listener, answers; /* `answers`: /proc/self/fd of the child that acts, where its descriptors have names */
static bool virtual_kernel;

/* -- what the caller is: read while it waits, and only then believed -- */

struct caller {
    int proc, root, cwd, memory, userns, network, ipc;
    mode_t umask;
    uid_t uid;
    gid_t gid, groups[MOST_GROUPS];
    int group_count;
    uint64_t capabilities;
};

static bool is_still_waiting(uint64_t id) {
    return ioctl(listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

static int open_caller(struct caller *caller, uint32_t pid) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%u", pid);
    caller->proc = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    caller->root = openat(caller->proc, "root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    caller->cwd = openat(caller->proc, "cwd", O_PATH | O_DIRECTORY | O_CLOEXEC);
    caller->memory = openat(caller->proc, "mem", O_RDONLY | O_CLOEXEC);
    caller->userns = openat(caller->proc, "ns/user", O_RDONLY | O_CLOEXEC);
    caller->network = openat(caller->proc, "ns/net", O_RDONLY | O_CLOEXEC);
    caller->ipc = openat(caller->proc, "ns/ipc", O_RDONLY | O_CLOEXEC);
    bool found = caller->proc >= 0 && caller->root >= 0 && caller->cwd >= 0 && caller->memory >= 0 && caller->userns >= 0;
    return found && caller->network >= 0 && caller->ipc >= 0 ? 0 : -1;
}

/* The numbers are those of the user namespace that we are in. */
static int read_identity(struct caller *caller) {
    static char text[65536];
    int fd = openat(caller->proc, "status", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (length <= 0)
        return -1;
    close(fd);
    text[length] = '\0';
    caller->group_count = 0;
    int found = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        unsigned value;
        if (sscanf(line, "Umask: %o", &value) == 1)
            caller->umask = value, found++;
        else if (sscanf(line, "Uid: %*u %*u %*u %u", &value) == 1)
            caller->uid = value, found++;
        else if (sscanf(line, "Gid: %*u %*u %*u %u", &value) == 1)
            caller->gid = value, found++;
        else if (sscanf(line, "CapEff: %lx", (unsigned long *)&caller->capabilities) == 1)
            found++;
        else if (!strncmp(line, "Groups:", 7)) {
            char *at = line + 7, *end;
            for (found++;; at = end) {
                unsigned long group = strtoul(at, &end, 10);
                if (end == at)
                    break;
                if (caller->group_count == MOST_GROUPS)
                    return -1;
                caller->groups[caller->group_count++] = (gid_t)group;
            }
        }
    }
    return found == 5 ? 0 : -1;
}

/* An ordinary user has the right to do so in the user namespace that the other one belongs to, and nowhere else. */
static int enter(int namespace) {
    if (setns(namespace, 0) == 0)
        return 0;
    int owner = errno == EPERM ? ioctl(namespace, NS_GET_USERNS) : -1;
    return owner < 0 || setns(owner, CLONE_NEWUSER) < 0 ? -1 : setns(namespace, 0);
}

/* Become the caller, with its rights and no more. */
static int become(struct caller *caller) {
    /* Groups as long as we are who we are: a runtime's namespace may forbid it. An ordinary user may only change them there, if at
     * all: where it has a single id nobody may, and all have that user's. */
    bool ordinary = geteuid() != 0;
    if (!ordinary && (read_identity(caller) < 0 || setgroups((size_t)caller->group_count, caller->groups) < 0))
        return -1;
    if (enter(caller->network) < 0 || enter(caller->ipc) < 0 || setns(caller->userns, CLONE_NEWUSER) < 0 || read_identity(caller) < 0)
        return -1;
    if (ordinary && setgroups((size_t)caller->group_count, caller->groups) < 0 && errno != EPERM)
        return -1;
    if (fchdir(caller->root) < 0 || chroot(".") < 0 || fchdir(caller->cwd) < 0)
        return -1;
    umask(caller->umask);
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || setresgid(caller->gid, caller->gid, caller->gid) < 0 ||
        setresuid(caller->uid, caller->uid, caller->uid) < 0)
        return -1;
    uint64_t keep = caller->capabilities;
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)keep, .permitted = (uint32_t)keep},
        {.effective = (uint32_t)(keep >> 32), .permitted = (uint32_t)(keep >> 32)},
    };
    if (syscall(SYS_capset, &header, data) < 0)
        return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

/* -- what a call is about -- */

struct call {
    uint64_t id;
    int at;             /* the directory that the path starts from, or the file itself; AT_FDCWD */
    bool on_file;       /* there is no path: `at` is the file */
    char path[PATH_MAX];
    mode_t mode;
    int flags;
};

static int read_path(const struct caller *caller, struct call *call, uint64_t address) {
    ssize_t length = pread(caller->memory, call->path, sizeof call->path, (off_t)address);
    if (length <= 0)
        return errno = EFAULT, -1;
    if (!memchr(call->path, '\0', (size_t)length))
        return errno = length == sizeof call->path ? ENAMETOOLONG : EFAULT, -1;
    return 0;
}

static int open_fd(const struct caller *caller, uint64_t number) {
    char name[32];
    if ((int)number == AT_FDCWD)
        return AT_FDCWD;
    snprintf(name, sizeof name, "fd/%d", (int)number);
    int fd = openat(caller->proc, name, O_PATH | O_CLOEXEC);
    if (fd < 0)
        errno = EBADF;
    return fd;
}

/* A path that names one of the caller's own descriptors means another's where we are: C libraries that know no fchmodat2 use it. */
static int through_descriptor(const struct caller *caller, struct call *call) {
    static const char *const places[] = {"/proc/self/fd/", "/proc/thread-self/fd/"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        size_t length = strlen(places[i]);
        if (strncmp(call->path, places[i], length))
            continue;
        size_t digits = strspn(call->path + length, "0123456789");
        if (!digits || digits > 9 || call->path[length + digits])
            continue;
        call->at = open_fd(caller, strtoul(call->path + length, NULL, 10));
        call->on_file = true;
        return call->at < 0 ? -1 : 0;
    }
    return 0;
}

static int understand(const struct caller *caller, const struct seccomp_notif *asked, struct call *call) {
    const uint64_t *argument = (const uint64_t *)asked->data.args;
    uint64_t path = 0, at = (uint64_t)AT_FDCWD;
    bool makes = false;
    call->id = asked->id;
    switch (asked->data.nr) {
#ifdef SYS_chmod
    case SYS_chmod: path = argument[0], call->mode = (mode_t)argument[1]; break;
    case SYS_creat:
        makes = true, path = argument[0], call->mode = (mode_t)argument[1], call->flags = O_CREAT | O_WRONLY | O_TRUNC;
        break;
    case SYS_open: makes = true, path = argument[0], call->flags = (int)argument[1], call->mode = (mode_t)argument[2]; break;
#endif
    case SYS_fchmod: call->on_file = true, at = argument[0], call->mode = (mode_t)argument[1]; break;
    case SYS_fchmodat: at = argument[0], path = argument[1], call->mode = (mode_t)argument[2]; break;
    case SYS_fchmodat2:
        at = argument[0], path = argument[1], call->mode = (mode_t)argument[2], call->flags = (int)argument[3];
        if (call->flags & ~(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
            return errno = EINVAL, -1;
        break;
    case SYS_openat:
        makes = true, at = argument[0], path = argument[1], call->flags = (int)argument[2], call->mode = (mode_t)argument[3];
        break;
    default: return errno = ENOSYS, -1;
    }
    call->mode &= 07777;
    if (!call->on_file && read_path(caller, call, path) < 0)
        return -1;
    if (call->on_file || call->path[0] != '/') {
        call->at = open_fd(caller, at);
        if (call->at < 0 && call->at != AT_FDCWD)
            return -1;
    } else if (!makes && through_descriptor(caller, call) < 0) {
        return -1;
    }
    if (!makes && !call->on_file && !call->path[0] && call->flags & AT_EMPTY_PATH) {
        call->on_file = call->at != AT_FDCWD;
        if (!call->on_file)
            strcpy(call->path, ".");
    }
    return makes;
}

/* -- what is done about it -- */

static uint64_t mount_of(int fd) {
    union {
        uint32_t mask;
        unsigned char bytes[256];
    } found = {0};
    uint64_t number = 0;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_MOUNT_ID, &found) == 0 && found.mask & STATX_MOUNT_ID)
        memcpy(&number, found.bytes + MOUNT_ID_AT, sizeof number);
    return number;
}

/* Whether the file is the sandbox's own: in the overlay that is its root. Who is unsure says no. A virtual kernel works on descriptors
 * of several mount namespaces, in which mounts have other numbers; volumes there do not lie on an overlay. */
static bool is_own(int fd, int root) {
    struct statfs info;
    if (fstatfs(fd, &info) < 0 || (unsigned long)info.f_type != OVERLAY)
        return false;
    uint64_t mount = mount_of(fd);
    return virtual_kernel || (mount && mount == mount_of(root));
}

static int set_mode(int fd, int root, mode_t mode) {
    struct stat info;
    char name[16];
    if (fstat(fd, &info) < 0)
        return -1;
    if (!is_own(fd, root)) /* on a directory it only says which group new files have */
        mode &= ~(mode_t)(S_ISDIR(info.st_mode) ? S_ISUID : SET_ID);
    snprintf(name, sizeof name, "%d", fd);
    return fchmodat(answers, name, mode, 0);
}

static int change_mode(const struct call *call, int root) {
    int fd = call->at;
    if (!call->on_file)
        fd = openat(call->at, call->path, O_PATH | O_CLOEXEC | (call->flags & AT_SYMLINK_NOFOLLOW ? O_NOFOLLOW : 0));
    return fd < 0 ? -1 : set_mode(fd, root, call->mode);
}

/* Open without waiting for anybody, first as a new file, so that we know whether the mode is ours to set. */
static int make_file(const struct call *call, int root) {
    int flags = call->flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    mode_t plain = call->mode & ~(mode_t)SET_ID;
    bool is_new = false;
    int fd = -1;
    if (flags & O_PATH) /* it makes nothing, whatever else is asked for, and cannot be handed over */
        return errno = EINVAL, -1;
    for (int i = 0; fd < 0 && i < TRIES; i++) {
        is_new = true;
        fd = openat(call->at, call->path, (flags & O_TMPFILE) == O_TMPFILE ? flags : flags | O_EXCL, plain);
        if (fd >= 0 || errno != EEXIST || flags & O_EXCL)
            break;
        is_new = false;
        fd = openat(call->at, call->path, flags & ~O_CREAT);
        if (fd < 0 && errno != ENOENT)
            break;
    }
    if (fd < 0)
        return -1;
    struct stat info;
    if (is_new && fstat(fd, &info) == 0 && set_mode(fd, root, (info.st_mode & 0777) | (call->mode & 07000)) < 0)
        return -1;
    int status = fcntl(fd, F_GETFL);
    if (!(call->flags & O_NONBLOCK))
        fcntl(fd, F_SETFL, status & ~O_NONBLOCK);
    return fd;
}

static void answer(uint64_t id, int error) {
    struct seccomp_notif_resp response = {.id = id, .error = -error};
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

static void hand_over(const struct call *call, int fd) {
    struct seccomp_notif_addfd added = {.id = call->id, .srcfd = (uint32_t)fd, .newfd_flags = (uint32_t)(call->flags & O_CLOEXEC)};
    added.flags = SECCOMP_ADDFD_FLAG_SEND;
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_ADDFD, &added) >= 0)
        return;
    if (errno != EINVAL) { /* it may hold no more descriptors, or is gone */
        answer(call->id, errno);
        return;
    }
    added.flags = 0; /* Linux before 5.14 does it in two steps */
    int number = ioctl(listener, SECCOMP_IOCTL_NOTIF_ADDFD, &added);
    struct seccomp_notif_resp response = {.id = call->id, .val = number, .error = number < 0 ? -errno : 0};
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

static int act(const struct seccomp_notif *asked) {
    static struct caller caller;
    static struct call call = {.at = AT_FDCWD};
    alarm(SECONDS);
    answers = open("/proc/self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (answers < 0 || open_caller(&caller, asked->pid) < 0)
        return EPERM;
    int makes = understand(&caller, asked, &call);
    int error = errno;
    if (!is_still_waiting(asked->id)) /* what was read may have been another process's */
        return 0;
    if (makes < 0)
        return error;
    if (become(&caller) < 0)
        return EPERM;
    int result = makes ? make_file(&call, caller.root) : change_mode(&call, caller.root);
    if (result < 0)
        return errno;
    if (makes)
        hand_over(&call, result);
    else
        answer(call.id, 0);
    return 0;
}

static void serve(void) {
    for (;;) {
        struct pollfd waiting = {.fd = listener, .events = POLLIN};
        struct seccomp_notif asked = {0};
        if (poll(&waiting, 1, -1) < 0 && errno != EINTR)
            return;
        if (!(waiting.revents & POLLIN)) {
            if (waiting.revents)
                return; /* nobody is left under the filter */
            continue;
        }
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) < 0) {
            if (errno != ENOENT && errno != EINTR) /* it was killed meanwhile */
                return;
            continue;
        }
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            int error = act(&asked);
            if (error)
                answer(asked.id, error);
            _exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) < 0 || status)
            answer(asked.id, child < 0 ? EAGAIN : EPERM);
    }
}

/* -- start -- */

/* The lists of control groups, each ended by NUL. A group that is gone means that the sandbox is, too. */
static void join(const char *lists, size_t length) {
    for (const char *list = lists; list < lists + length; list += strlen(list) + 1) {
        int fd = open(list, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, "0", 1) != 1)
            _exit(125);
        close(fd);
    }
}

static int receive_listener(int channel) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd = -1;
    if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != 1)
        return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof fd))
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

int supervise(int channel, bool with_virtual_kernel) {
    static char lists[65536], lasting[65536];
    virtual_kernel = with_virtual_kernel;
    pid_t child = fork();
    if (child)
        return child < 0 ? 125 : 0;
    if (setsid() < 0 || chdir("/") < 0)
        _exit(125);
    ssize_t length = recv(channel, lists, sizeof lists - 1, 0), lasting_length = recv(channel, lasting, sizeof lasting - 1, 0);
    if (length <= 0 || lasting_length <= 0)
        _exit(125);
    join(lists, (size_t)length - 1); /* one NUL more, so that the message is never empty */
    listener = receive_listener(channel);
    close(channel);
    if (listener < 0)
        _exit(0);
    join(lasting, (size_t)lasting_length - 1);
    serve();
    _exit(0);
}

/* Install a filter some of whose calls the supervisor decides about. Returns -1 with errno. */
int install_supervised(struct sock_fprog *program, int channel) {
    int fd = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program);
    if (fd < 0)
        return -1;
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {"", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(channel, &message, MSG_NOSIGNAL) != 1)
        return -1;
    close(fd);
    close(channel);
    return 0;
}
