/*
 * atoll-mount: makes a sandbox's file tree and namespaces, then becomes the container runtime; and, inside, the last step
 * before the agent.
 *
 * Theory of operation
 *
 * `atoll-mount prepare FD REPORT -- RUNTIME ARGS…` reads a list of operations from descriptor FD and executes them in order. Errors go to
 * descriptor REPORT; all descriptors from FD on are closed for the runtime. It starts as root of the host and works in three rooms:
 *
 *   1. The host room. A new mount namespace, private, so nothing that follows is ever seen by the host and all of it is
 *      gone when the last process in it is gone: no clean-up can be forgotten. Network, IPC and UTS namespaces are made here
 *      too, so they belong to the host's user namespace: root inside the sandbox has no power over them, and no file of
 *      /proc/sys is writable for it. What only the host's root may do happens here: id-mapped clones of the layers, a
 *      tmpfs with device nodes, sysfs.
 *   2. The sandbox's room (after the operation `enter`). A child in the sandbox's user namespace and a mount namespace owned by
 *      it. The overlay is mounted here, with the credentials of the sandbox's root, which is nobody outside. Everything that
 *      resolves a path inside the image happens here, with openat2 and RESOLVE_IN_ROOT, because the image is hostile.
 *   3. Back in the parent, which joins the finished mount namespace and executes the runtime. The runtime sees the tree
 *      under the stage directory; nobody else does.
 *
 * `atoll-mount within ROOT CWD CAPS FD LIST FILTER [GUARD] -- ARGV…` runs as the sandbox's first program, from a descriptor. It covers what
 * /proc should not show. The sandbox's root is a directory *below* the overlay's mount point, so neither the overlay nor its
 * options appear in any /proc/PID/mountinfo; this step enters that directory, gives up the three capabilities it needed for
 * all that, installs the filter of system calls, and executes the agent from a descriptor. The agent's file is not readable for the sandbox (mode 0711, owner not mapped), so the kernel
 * makes the process undumpable and bound to the host's user namespace: root inside can neither trace it nor open its memory.
 *
 * `atoll-mount supervise FD KIND` decides about set-id bits for a sandbox that has a writable volume: see guard.c.
 *
 * Every failure prints the step and the errno and exits with 125; nothing is retried.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guard.h"

#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 0x00000004
#endif
#ifndef MOVE_MOUNT_T_EMPTY_PATH
#define MOVE_MOUNT_T_EMPTY_PATH 0x00000040
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

struct attributes {
    uint64_t set, clear, propagation, userns_fd;
};
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_NOEXEC = 8, ATTR_IDMAP = 0x100000 };

static const char *step = "start";
static const char *detail = "";
static int report = 2;
static int userns = -1;     /* the sandbox's user namespace */
static int root = -1;       /* the directory that becomes the sandbox's root; paths inside resolve here */

static _Noreturn void fail(void) {
    int error = errno;
    dprintf(report, "%s %s: %s (%d)\n", step, detail, strerror(error), error);
    _exit(125);
}

static void need(long result) {
    if (result < 0)
        fail();
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    need(fd);
    size_t length = strlen(text);
    if (write(fd, text, length) != (ssize_t)length)
        fail();
    close(fd);
}

/* -- the list of operations: NUL-terminated words, each operation with a fixed number of arguments -- */

static char *words, *words_end;

static void load(int fd) {
    size_t size = 0, room = 0;
    for (;;) {
        if (size + 4096 > room) {
            room = room ? room * 2 : 65536;
            if (room > (8u << 20)) {
                errno = E2BIG;
                fail();
            }
            words = realloc(words, room);
            if (!words)
                fail();
        }
        ssize_t got = read(fd, words + size, room - size);
        need(got);
        if (got == 0)
            break;
        size += (size_t)got;
    }
    close(fd);
    words_end = words + size;
    if (size == 0 || words_end[-1] != '\0') {
        errno = EINVAL;
        fail();
    }
}

static char *next(void) {
    if (words >= words_end) {
        errno = EINVAL;
        fail();
    }
    char *word = words;
    words += strlen(words) + 1;
    return word;
}

static unsigned long number(void) {
    char *end, *word = next();
    errno = 0;
    unsigned long value = strtoul(word, &end, 0);
    if (errno || *end || end == word) {
        errno = EINVAL;
        fail();
    }
    return value;
}

static bool flag(const char *flags, const char *name) {
    size_t length = strlen(name);
    for (const char *p = flags; (p = strstr(p, name)); p += length)
        if ((p == flags || p[-1] == ',') && (p[length] == ',' || !p[length]))
            return true;
    return false;
}

static unsigned long mount_flags(const char *flags) {
    return (flag(flags, "ro") ? MS_RDONLY : 0) | (flag(flags, "nosuid") ? MS_NOSUID : 0) |
           (flag(flags, "nodev") ? MS_NODEV : 0) | (flag(flags, "noexec") ? MS_NOEXEC : 0);
}

static uint64_t attribute_flags(const char *flags) {
    return (flag(flags, "ro") ? ATTR_RDONLY : 0) | (flag(flags, "nosuid") ? ATTR_NOSUID : 0) |
           (flag(flags, "nodev") ? ATTR_NODEV : 0) | (flag(flags, "noexec") ? ATTR_NOEXEC : 0);
}

/* -- paths inside the image: never through a link that leaves it, never through a magic link -- */

static int open_inside(const char *path, uint64_t extra_resolve, int flags) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC),
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | extra_resolve};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* The mount point PATH inside the root, made if it is missing. `strict`: no symbolic link anywhere on the way. */
static int mount_point(const char *path, bool directory, bool strict) {
    uint64_t resolve = strict ? RESOLVE_NO_SYMLINKS : 0;
    int fd = open_inside(path, resolve, O_PATH);
    if (fd < 0 && errno == ENOENT) {
        char parent[PATH_MAX];
        int here = open_inside("/", 0, O_PATH | O_DIRECTORY);
        need(here);
        for (const char *p = path; *p;) {
            p += strspn(p, "/");
            size_t length = strcspn(p, "/");
            if (!length)
                break;
            bool last = !p[length + strspn(p + length, "/")];
            if ((size_t)(p - path) + length >= sizeof parent) {
                errno = ENAMETOOLONG;
                return -1;
            }
            memcpy(parent, path, (size_t)(p - path) + length);
            parent[(size_t)(p - path) + length] = '\0';
            char name[NAME_MAX + 1];
            if (length > NAME_MAX) {
                errno = ENAMETOOLONG;
                return -1;
            }
            memcpy(name, p, length);
            name[length] = '\0';
            int deeper = open_inside(parent, resolve, O_PATH);
            if (deeper < 0 && errno == ENOENT) {
                int made = last && !directory ? mknodat(here, name, S_IFREG | 0644, 0) : mkdirat(here, name, 0755);
                if (made < 0)
                    return -1;
                deeper = open_inside(parent, resolve, O_PATH);
            }
            if (deeper < 0)
                return -1;
            close(here);
            here = deeper;
            p += length;
        }
        fd = here;
    }
    if (fd < 0)
        return -1;
    struct stat st;
    need(fstat(fd, &st));
    if (S_ISLNK(st.st_mode) || S_ISDIR(st.st_mode) != directory) {
        errno = directory ? ENOTDIR : EISDIR;
        return -1;
    }
    return fd;
}

static const char *fd_path(int fd) {
    static char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return path;
}

/* -- namespaces -- */

/* A user namespace lives as long as a descriptor of it: a child makes it, we map it and keep it. */
static int make_userns(const char *uid_map, const char *gid_map) {
    int ready[2], go[2];
    char byte;
    need(pipe2(ready, O_CLOEXEC));
    need(pipe2(go, O_CLOEXEC));
    pid_t child = fork();
    need(child);
    if (child == 0) {
        close(ready[0]);
        close(go[1]);
        if (unshare(CLONE_NEWUSER) < 0)
            _exit(1);
        if (write(ready[1], "", 1) != 1 || read(go[0], &byte, 1) < 0)
            _exit(1);
        _exit(0);
    }
    close(ready[1]);
    close(go[0]);
    if (read(ready[0], &byte, 1) != 1) {
        errno = EPERM;
        fail();
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    write_file(path, uid_map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    write_file(path, gid_map);
    snprintf(path, sizeof path, "/proc/%d/ns/user", child);
    int made = open(path, O_RDONLY | O_CLOEXEC);
    need(made);
    close(go[1]);
    close(ready[0]);
    need(waitpid(child, NULL, 0));
    return made;
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    need(fd);
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    need(ioctl(fd, SIOCSIFFLAGS, &request));
    close(fd);
}

/* -- mounts -- */

/* `nolinks`: whoever may write to a directory on the way could put a link to anywhere there, so none is followed. */
static int open_source(const char *source, const char *flags) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = flag(flags, "nolinks") ? RESOLVE_NO_SYMLINKS : 0};
    int found = (int)syscall(SYS_openat2, AT_FDCWD, source, &how, sizeof how);
    need(found);
    return found;
}

/* A clone of what was FOUND as a mount of its own, with ids mapped by the user namespace IDS unless that is -1. */
static int clone_tree(int found, const char *flags, int ids) {
    int tree = (int)syscall(SYS_open_tree, found, "", OPEN_TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
    need(tree);
    close(found);
    struct attributes attributes = {.set = attribute_flags(flags)};
    if (ids >= 0) {
        attributes.set |= ATTR_IDMAP;
        attributes.userns_fd = (uint64_t)ids;
    }
    need(syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes));
    return tree;
}

static void attach(int tree, int at, const char *path) {
    need(syscall(SYS_move_mount, tree, "", at, path,
                 MOVE_MOUNT_F_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_T_EMPTY_PATH)));
    close(tree);
}

/* Clones are taken before the stage is mounted, which may cover their sources, and attached once it is. */
enum { MOST_CLONES = 256 };
static struct clone {
    int tree;
    const char *name;
} cloned[MOST_CLONES];
static int clones;

/* The sandbox's id FIRST (its root) is what OWNER is on the disk, the others are the ids from OTHERS on, which no user of the host has;
 * nobody inside is anybody else. A map is one to one, so an owner among OTHERS has no second meaning. */
static void owner_map(char *text, size_t room, unsigned long owner, unsigned long first, unsigned long count, unsigned long others) {
    unsigned long gap = owner > others && owner < others + count ? owner - others : 0;
    int length = snprintf(text, room, "%lu %lu 1\n", owner, first);
    if (gap > 1)
        length += snprintf(text + length, room - (size_t)length, "%lu %lu %lu\n", others + 1, first + 1, gap - 1);
    if (gap + 1 < count)
        snprintf(text + length, room - (size_t)length, "%lu %lu %lu\n", others + gap + 1, first + gap + 1, count - gap - 1);
}

/* Root inside is the owner of the volume, and never the host's root: see docs/decisions/0080-writable-volumes.md. */
static void op_volume(const char *source, const char *name, const char *flags) {
    unsigned long first = number(), count = number(), others = number();
    char users[128], groups[128];
    struct stat info;
    struct statfs where;
    int found = open_source(source, flags);
    need(fstat(found, &info));
    need(fstatfs(found, &where));
    if ((unsigned long)where.f_type == 0x794c7630) { /* an overlay: the supervisor would take it for the sandbox's own files */
        errno = EOPNOTSUPP;
        fail();
    }
    if (info.st_uid == 0 || info.st_gid == 0 || clones == MOST_CLONES) {
        errno = clones == MOST_CLONES ? E2BIG : EPERM;
        fail();
    }
    owner_map(users, sizeof users, info.st_uid, first, count, others);
    owner_map(groups, sizeof groups, info.st_gid, first, count, others);
    int ids = make_userns(users, groups);
    cloned[clones++] = (struct clone){.tree = clone_tree(found, flags, ids), .name = name};
    close(ids);
}

static void attach_clone(const struct clone *clone) {
    struct stat st;
    detail = clone->name;
    need(fstat(clone->tree, &st));
    if (S_ISDIR(st.st_mode)) {
        need(mkdir(clone->name, 0755));
    } else {
        int file = open(clone->name, O_CREAT | O_WRONLY | O_CLOEXEC | O_EXCL, 0644);
        need(file);
        close(file);
    }
    attach(clone->tree, AT_FDCWD, clone->name);
}

static void bind_inside(int source, int target, const char *flags) {
    int tree = (int)syscall(SYS_open_tree, source, "", OPEN_TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
    need(tree);
    struct attributes attributes = {.set = attribute_flags(flags)};
    if (attributes.set)
        need(syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes));
    attach(tree, target, "");
}

static void op_place(const char *source) { /* place SOURCE TARGET FLAGS: a staged mount goes to its place inside */
    char *target = next(), *flags = next();
    int from = open(source, O_PATH | O_CLOEXEC);
    need(from);
    struct stat st;
    need(fstat(from, &st));
    detail = target;
    int at = mount_point(target, S_ISDIR(st.st_mode), flag(flags, "strict"));
    need(at);
    bind_inside(from, at, flags);
    close(from);
    close(at);
}

static void op_mount(const char *type) { /* mount TYPE TARGET FLAGS OPTIONS: a new file system inside */
    char *target = next(), *flags = next(), *options = next();
    int at = mount_point(target, true, true);
    need(at);
    need(mount(type, fd_path(at), type, mount_flags(flags), options));
    close(at);
}

/* mask TARGET: an empty read-only directory over a directory, /dev/null over a file; what is not there needs none. */
static void op_mask(const char *target) {
    int at = open_inside(target, RESOLVE_NO_SYMLINKS, O_PATH);
    if (at < 0 && errno == ENOENT)
        return;
    need(at);
    struct stat st;
    need(fstat(at, &st));
    if (S_ISDIR(st.st_mode)) {
        need(mount("tmpfs", fd_path(at), "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,nr_inodes=2,mode=555"));
    } else {
        int null = open_inside("/dev/null", RESOLVE_NO_SYMLINKS, O_PATH);
        need(null);
        bind_inside(null, at, "");
        close(null);
    }
    close(at);
}

static void op_directory(const char *target) { /* directory TARGET MODE UID GID: made if missing, else left as it is */
    mode_t mode = (mode_t)number();
    uid_t uid = (uid_t)number();
    gid_t gid = (gid_t)number();
    int at = open_inside(target, 0, O_PATH | O_DIRECTORY);
    if (at < 0 && errno == ENOENT) {
        at = mount_point(target, true, false);
        need(at);
        need(fchmodat(AT_FDCWD, fd_path(at), mode, 0));
        need(fchownat(at, "", uid, gid, AT_EMPTY_PATH));
    }
    need(at);
    close(at);
}

/* Our copy of the host's mounts must not keep a file system alive that the host unmounts: what lies on a loop device is let go. A
 * runtime that leaves the host's tree behind lets go of all of it; one that stays in our mount namespace does not. */
static void let_go(void) {
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    char *line = NULL;
    size_t room = 0;
    if (!mounts)
        fail();
    while (getline(&line, &room, mounts) > 0) {
        char where[PATH_MAX];
        char *source = strstr(line, " - ");
        if (!source || !(source = strchr(source + 3, ' ')) || strncmp(source, " /dev/loop", 10) ||
            sscanf(line, "%*s %*s %*s %*s %4095s", where) != 1 || !strcmp(where, "/"))
            continue;
        umount2(where, MNT_DETACH | UMOUNT_NOFOLLOW);
    }
    free(line);
    fclose(mounts);
}

/* join LIST: put us into a control group. The kernel makes who writes wait for all processors; a child does that while we go on, and
 * we are in the group before there is a runtime. */
enum { MOST_JOINS = 16 };
static pid_t joining[MOST_JOINS];
static int joins;

static void op_join(const char *list) {
    char us[16];
    if (joins == MOST_JOINS) {
        errno = E2BIG;
        fail();
    }
    snprintf(us, sizeof us, "%d", getpid());
    pid_t child = fork();
    need(child);
    if (child == 0) {
        need(prctl(PR_SET_PDEATHSIG, SIGKILL));
        write_file(list, us);
        _exit(0);
    }
    joining[joins++] = child;
}

static void joined(void) {
    int status;
    for (int i = 0; i < joins; i++) {
        need(waitpid(joining[i], &status, 0));
        if (status)
            _exit(125); /* the child has said why */
    }
}

static int guard_filter = -1, guard_channel = -1;

static void host_operation(const char *op) {
    if (!strcmp(op, "unshare")) {
        need(unshare((int)number()));
        need(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
    } else if (!strcmp(op, "userns")) {
        char *uid_map = next();
        userns = make_userns(uid_map, next());
    } else if (!strcmp(op, "hostname")) {
        char *name = next();
        need(sethostname(name, strlen(name)));
    } else if (!strcmp(op, "loopback")) {
        loopback_up();
    } else if (!strcmp(op, "join")) {
        detail = next();
        op_join(detail);
    } else if (!strcmp(op, "write")) {
        detail = next();
        write_file(detail, next());
    } else if (!strcmp(op, "umount")) {
        detail = next();
        if (umount2(detail, MNT_DETACH) < 0 && errno != EINVAL && errno != ENOENT)
            fail();
    } else if (!strcmp(op, "hide")) { /* hide DIRECTORY: the runtime must not see what is in it */
        detail = next();
        need(mount("hidden", detail, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k"));
    } else if (!strcmp(op, "let-go")) {
        let_go();
    } else if (!strcmp(op, "stage")) { /* stage DIRECTORY: an empty tmpfs there, and we stand in it */
        detail = next();
        need(mount("stage", detail, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755"));
        need(chdir(detail));
        for (int i = 0; i < clones; i++)
            attach_clone(&cloned[i]);
    } else if (!strcmp(op, "mkdir")) {
        detail = next();
        need(mkdir(detail, 0755));
    } else if (!strcmp(op, "clone")) { /* clone SOURCE NAME FLAGS: a tree of the host, staged under NAME */
        detail = next();
        char *name = next();
        if (clones == MOST_CLONES) {
            errno = E2BIG;
            fail();
        }
        char *flags = next();
        int found = open_source(detail, flags);
        cloned[clones++] = (struct clone){.tree = clone_tree(found, flags, flag(flags, "idmap") ? userns : -1), .name = name};
    } else if (!strcmp(op, "volume")) { /* volume SOURCE NAME FLAGS FIRST COUNT OTHERS: a tree that the sandbox may write to */
        detail = next();
        char *name = next();
        op_volume(detail, name, next());
    } else if (!strcmp(op, "guard")) { /* guard FILTER SOCKET: the runtime runs under a filter, with a supervisor */
        guard_filter = (int)number();
        guard_channel = (int)number();
    } else if (!strcmp(op, "filesystem")) { /* filesystem TYPE NAME FLAGS OPTIONS: staged under NAME */
        char *type = next();
        detail = next();
        char *flags = next(), *options = next();
        need(mkdir(detail, 0755));
        need(mount(type, detail, type, mount_flags(flags), options));
    } else if (!strcmp(op, "device")) { /* device NAME MODE MAJOR MINOR UID: a character device, open to all */
        detail = next();
        mode_t mode = (mode_t)number();
        unsigned int high = (unsigned)number(), low = (unsigned)number();
        uid_t owner = (uid_t)number();
        need(mknod(detail, S_IFCHR | mode, makedev(high, low)));
        need(chmod(detail, mode));
        need(lchown(detail, owner, owner));
    } else if (!strcmp(op, "link")) { /* link NAME TARGET UID */
        detail = next();
        need(symlink(next(), detail));
        uid_t owner = (uid_t)number();
        need(lchown(detail, owner, owner));
    } else if (!strcmp(op, "keep-userns")) { /* keep-userns NAME: a path by which the runtime joins it */
        detail = next();
        int file = open(detail, O_CREAT | O_WRONLY | O_CLOEXEC | O_EXCL, 0600);
        need(file);
        close(file);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", userns);
        need(mount(path, detail, NULL, MS_BIND, NULL));
    } else {
        errno = ENOSYS;
        fail();
    }
}

/* An overlay looks at its layers with the rights of whoever mounted it. `outsider`: of one who owns nothing, so that what is the host's
 * root's alone stays closed to everybody inside, also to root. */
static void op_overlay(const char *target, const char *flags, const char *options) {
    enum { OUTSIDER = 65534 };
    bool outsider = flag(flags, "outsider");
    if (outsider) { /* with the id go the capabilities about files, and they come back with it */
        setfsgid(OUTSIDER);
        setfsuid(OUTSIDER);
        if (setfsuid(OUTSIDER) != OUTSIDER) { /* it answers what it was before */
            errno = EPERM;
            fail();
        }
    }
    need(mount("overlay", target, "overlay", mount_flags(flags), options));
    if (outsider) {
        setfsuid(0);
        setfsgid(0);
    }
}

static void sandbox_operation(const char *op) {
    detail = next();
    if (!strcmp(op, "overlay")) { /* overlay NAME FLAGS OPTIONS: relative directories, so no host path is in the options */
        char *flags = next(), *options = next();
        op_overlay(detail, flags, options);
    } else if (!strcmp(op, "root")) { /* root NAME: where paths inside resolve from now on */
        root = open(detail, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        need(root);
    } else if (!strcmp(op, "place")) {
        op_place(detail);
    } else if (!strcmp(op, "mount")) {
        op_mount(detail);
    } else if (!strcmp(op, "mask")) {
        op_mask(detail);
    } else if (!strcmp(op, "directory")) {
        op_directory(detail);
    } else if (!strcmp(op, "bind")) { /* bind SOURCE NAME: a staged tree a second time, for the runtime's own use */
        char *name = next();
        int from = open(detail, O_PATH | O_CLOEXEC), at = open(name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        need(from);
        need(at);
        bind_inside(from, at, "");
        close(from);
        close(at);
    } else {
        errno = ENOSYS;
        fail();
    }
}

/* The child makes the sandbox's mount namespace and says so; we join it while it still lives. */
static void work_in_sandbox(void) {
    int done[2], leave[2];
    char byte;
    need(pipe2(done, O_CLOEXEC));
    need(pipe2(leave, O_CLOEXEC));
    pid_t child = fork();
    need(child);
    if (child == 0) {
        need(prctl(PR_SET_PDEATHSIG, SIGKILL));
        close(leave[1]);
        step = "enter";
        need(setns(userns, CLONE_NEWUSER));
        need(setresgid(0, 0, 0));
        need(setresuid(0, 0, 0));
        umask(022);
        need(unshare(CLONE_NEWNS));
        while (words < words_end) {
            step = next();
            sandbox_operation(step);
        }
        need(write(done[1], "", 1));
        need(read(leave[0], &byte, 1));
        _exit(0);
    }
    close(done[1]);
    if (read(done[0], &byte, 1) != 1)
        _exit(125); /* the child has said why */
    char path[64];
    step = "join";
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", child);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    need(fd);
    need(setns(fd, CLONE_NEWNS));
    close(fd);
    close(leave[1]);
    need(waitpid(child, NULL, 0));
}

/* The filter comes ready made; a library would take longer to make it than all the rest takes. GUARD: the socket of the supervisor
 * that some of its calls are handed to, or -1. */
static void filter_calls(int fd, int guard) {
    static struct sock_filter code[BPF_MAXINSNS];
    size_t size = 0;
    ssize_t got;
    while ((got = read(fd, (char *)code + size, sizeof code - size)) > 0)
        size += (size_t)got;
    if (got < 0 || size == 0 || size == sizeof code || size % sizeof *code) {
        errno = EINVAL;
        fail();
    }
    struct sock_fprog program = {.len = (unsigned short)(size / sizeof *code), .filter = code};
    if (guard >= 0)
        need(install_supervised(&program, guard));
    else
        need(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static int prepare(int argc, char **argv) {
    if (argc < 6 || strcmp(argv[4], "--")) {
        dprintf(2, "usage: atoll-mount prepare FD REPORT -- PROGRAM ARGUMENTS\n");
        return 2;
    }
    int list = atoi(argv[2]);
    report = atoi(argv[3]);
    step = "read";
    need(syscall(SYS_close_range, (unsigned)list, ~0u, 4u /* CLOEXEC */));
    load(list);
    umask(022);
    while (words < words_end) {
        step = next();
        detail = "";
        if (!strcmp(step, "enter")) {
            work_in_sandbox();
            break;
        }
        host_operation(step);
    }
    step = "join";
    joined();
    step = "execute";
    detail = argv[5];
    need(chdir("/"));
    if (guard_filter >= 0) {
        filter_calls(guard_filter, guard_channel);
        close(guard_filter);
    }
    execv(argv[5], argv + 5);
    fail();
}

/* -- inside -- */

/* shadow TARGET CONTENT: a small file over a file of /proc that the sandbox could write to. The files lie in a tmpfs above the
 * sandbox's root, where nobody inside gets to. */
static void op_shadow(const char *target) {
    static int made;
    char path[32];
    if (!made)
        need(mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755"));
    snprintf(path, sizeof path, "/dev/null-%d", made++);
    int file = open(path, O_CREAT | O_WRONLY | O_CLOEXEC | O_EXCL, 0444);
    need(file);
    close(file);
    write_file(path, next());
    int from = open(path, O_PATH | O_CLOEXEC), at = open_inside(target, RESOLVE_NO_SYMLINKS, O_PATH);
    need(from);
    need(at);
    bind_inside(from, at, "ro,nosuid,nodev,noexec");
    close(from);
    close(at);
}

/* What /proc tells and takes, covered: it could not be done before there was a /proc. */
static void cover(int list) {
    load(list);
    while (words < words_end) {
        step = next(), detail = next();
        if (!strcmp(step, "mask")) {
            op_mask(detail);
        } else if (!strcmp(step, "shadow")) {
            op_shadow(detail);
        } else {
            errno = ENOSYS;
            fail();
        }
    }
}

static void keep_only(uint64_t keep) {
    for (int capability = 0; capability < 64; capability++)
        if (!(keep >> capability & 1) && prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1)
            need(prctl(PR_CAPBSET_DROP, capability, 0, 0, 0));
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)keep, .permitted = (uint32_t)keep},
        {.effective = (uint32_t)(keep >> 32), .permitted = (uint32_t)(keep >> 32)},
    };
    need(syscall(SYS_capset, &header, data));
}

static int within(int argc, char **argv, char **environment) {
    bool guarded = argc > 10 && strcmp(argv[8], "--");
    char **arguments = argv + 9 + guarded;
    if (argc < 10 + guarded || strcmp(arguments[-1], "--")) {
        dprintf(2, "usage: atoll-mount within ROOT CWD CAPABILITIES PROGRAM-FD LIST-FD FILTER-FD [GUARD-FD] -- ARGUMENTS\n");
        return 2;
    }
    int program = atoi(argv[5]), filter = atoi(argv[7]), guard = guarded ? atoi(argv[8]) : -1;
    char here[PATH_MAX];
    step = "root", detail = argv[2];
    root = open(argv[2], O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    need(root);
    cover(atoi(argv[6]));
    step = "root", detail = argv[2];
    need(fchdir(root));
    need(chroot("."));
    step = "cwd", detail = argv[3];
    need(chdir(argv[3]));
    if (!getcwd(here, sizeof here) || here[0] != '/') {
        errno = ENOENT;
        fail();
    }
    step = "capabilities";
    keep_only(strtoull(argv[4], NULL, 16));
    step = "execute";
    need(fcntl(program, F_SETFD, FD_CLOEXEC));
    need(syscall(SYS_close_range, 4u, ~0u, 4u /* CLOEXEC */));
    step = "filter";
    need(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    filter_calls(filter, guard);
    syscall(SYS_execveat, program, "", arguments, environment, AT_EMPTY_PATH);
    fail();
}

int main(int argc, char **argv, char **environment) {
    if (argc > 1 && !strcmp(argv[1], "prepare"))
        return prepare(argc, argv);
    if (argc > 1 && !strcmp(argv[1], "within"))
        return within(argc, argv, environment);
    if (argc == 4 && !strcmp(argv[1], "supervise"))
        return supervise(atoi(argv[2]), !strcmp(argv[3], "virtual"));
    dprintf(2, "usage: atoll-mount prepare|within|supervise …\n");
    return 2;
}
