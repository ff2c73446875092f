/* The host part: what only root of the host may do. Nothing here resolves a path of the image. */
#include <linux/capability.h>
#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/stat.h>

#include "native.h"

enum { O_PATH_ = 010000000, O_CLOEXEC_ = 02000000, O_DIRECTORY_ = 0200000 };
enum { AF_INET_ = 2, SOCK_DGRAM_ = 2, SET_FLAGS = 0x8914, UP_AND_RUNNING = 0x41 };
enum { STACK = 64 << 10, MS_PRIVATE_ = 1 << 18, MS_REC_ = 1 << 14 };

_Noreturn void launcher_gives_up(struct worker *, long error);
void report_first(void);
void report_ready(void);
static struct worker me = {.step = "start", .detail = "", .give_up = launcher_gives_up};

int first_pid;              /* the sandbox's first process; 0: none yet */
static int userns = -1;     /* its user namespace */
static int group_directory = -1;
static char stack[STACK] __attribute__((aligned(16)));

static void write_text(int fd, const char *text)
{
    if ((size_t)need(&me, CALL(write, fd, text, strlen(text))) != strlen(text))
        me.give_up(&me, EINVAL);
}

static void write_file(const char *path, const char *text)
{
    int fd = (int)need(&me, CALL(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC_, 0));
    write_text(fd, text);
    CALL(close, fd);
}

/* /proc/PID/NAME of the first process. */
static const char *of_first(const char *name)
{
    static char path[64];
    char digits[12], *at = path, *digit = digits + sizeof digits;
    *--digit = '\0';
    for (int pid = first_pid; pid; pid /= 10)
        *--digit = (char)('0' + pid % 10);
    for (const char *part = "/proc/"; *part;)
        *at++ = *part++;
    while (*digit)
        *at++ = *digit++;
    *at++ = '/';
    while (*name)
        *at++ = *name++;
    *at = '\0';
    return path;
}

/* A setting of the network namespace. Through a /proc of our own: in the host's, the names of every namespace's settings hang on one
 * chain, which is as long as there are sandboxes. Only the host's root can have one. */
static void set(const char *name, const char *value)
{
    static int proc = -1;
    if (proc < 0) {
        int context = (int)CALL(fsopen, "proc", FSOPEN_CLOEXEC);
        if (context >= 0 && CALL(fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
            proc = (int)CALL(fsmount, context, FSMOUNT_CLOEXEC, 0);
        CALL(close, context);
    }
    if (proc < 0)
        proc = (int)need(&me, CALL(openat, AT_FDCWD, "/proc", O_PATH_ | O_DIRECTORY_ | O_CLOEXEC_, 0));
    int fd = (int)need(&me, CALL(openat, proc, name, O_WRONLY | O_CLOEXEC_, 0));
    write_text(fd, value);
    CALL(close, fd);
}

static void loopback_up(void)
{
    struct { /* struct ifreq */
        char name[16];
        short flags;
        char rest[22];
    } request = {.name = "lo", .flags = UP_AND_RUNNING};
    int fd = (int)need(&me, CALL(socket, AF_INET_, SOCK_DGRAM_ | O_CLOEXEC_, 0));
    need(&me, CALL(ioctl, fd, SET_FLAGS, &request));
    CALL(close, fd);
}

/* The first process shares our memory and descriptors until it executes the agent: nothing is copied, and it can say why it
 * failed. Its user, PID and mount namespaces are new and belong to it; network, IPC and UTS are ours, which the host owns. */
static void start_first(void)
{
    struct clone_args arguments = {
        .flags = CLONE_VM | CLONE_FILES | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID,
        .child_tid = (uint64_t)(uintptr_t)&shared.alive,
        .exit_signal = 17, /* SIGCHLD */
        .stack = (uint64_t)(uintptr_t)stack,
        .stack_size = STACK,
    };
    if (group_directory >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)group_directory;
    }
    shared.alive = 1;
    long self = CALL(getpid);
    shared.launcher = (int)need(&me, CALL(pidfd_open, self, 0));
    first_pid = (int)need(&me, start_process(&arguments, sizeof arguments, first_process));
}

static void publish(unsigned long slot, int fd)
{
    if (slot >= MOST_SLOTS || shared.slots[slot])
        me.give_up(&me, EINVAL);
    __atomic_store_n(&shared.slots[slot], fd + 1, __ATOMIC_SEQ_CST);
    futex_wake(&shared.slots[slot]);
}

/* The stage: a tmpfs with the two things that cover others, an empty file and an empty directory. They belong to the host's root,
 * so nobody inside can change them. */
static void make_stage(unsigned long slot)
{
    char options[] = "size=1m,mode=777";
    int stage = new_filesystem(&me, "tmpfs", attribute_flags("nosuid,nodev"), options);
    need(&me, CALL(mknodat, stage, "null", S_IFREG | 0444, 0));
    need(&me, CALL(mkdirat, stage, "null-directory", 0555));
    need(&me, CALL(mkdirat, stage, "proc", 0755));
    need(&me, CALL(mkdirat, stage, "sys", 0755));
    publish(slot, stage);
}

static void make_devices(struct list *words) /* devices SLOT FLAGS OPTIONS OWNER NODES LINKS … */
{
    unsigned long slot = next_number(words, &me);
    char *flags = next_word(words, &me), *options = next_word(words, &me);
    unsigned long owner = next_number(words, &me), nodes = next_number(words, &me), links = next_number(words, &me);
    int directory = new_filesystem(&me, "tmpfs", attribute_flags(flags), options);
    while (nodes--) { /* NAME MAJOR MINOR */
        me.detail = next_word(words, &me);
        unsigned long major = next_number(words, &me), minor = next_number(words, &me);
        need(&me, CALL(mknodat, directory, me.detail, S_IFCHR | 0666, major << 8 | minor));
        need(&me, CALL(fchownat, directory, me.detail, owner, owner, AT_SYMLINK_NOFOLLOW));
    }
    while (links--) { /* NAME TARGET */
        me.detail = next_word(words, &me);
        need(&me, CALL(symlinkat, next_word(words, &me), directory, me.detail));
        need(&me, CALL(fchownat, directory, me.detail, owner, owner, AT_SYMLINK_NOFOLLOW));
    }
    publish(slot, directory);
}

/* Into the user namespace in which an ordinary user is root, and a mount namespace that belongs to it. Nothing of the host is ours
 * there: what follows can do no more than that user could. */
static void enter(int namespace)
{
    need(&me, CALL(setns, namespace, CLONE_NEWUSER));
    CALL(close, namespace);
    /* Our own files in /proc would belong to the host's root, and the id maps of the first process are among them. */
    need(&me, CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0));
    need(&me, CALL(unshare, CLONE_NEWNS));
    need(&me, CALL(mount, NULL, "/", NULL, MS_REC_ | MS_PRIVATE_, NULL));
}

static void operation(const char *op, struct list *words)
{
    if (!strcmp(op, "unshare")) {
        need(&me, CALL(unshare, next_number(words, &me)));
    } else if (!strcmp(op, "enter")) { /* enter FD */
        enter((int)next_number(words, &me));
    } else if (!strcmp(op, "ready")) { /* say that all up to here is done */
        report_ready();
    } else if (!strcmp(op, "remove")) { /* remove PATH: a tree, whoever of our ids its files belong to */
        me.detail = next_word(words, &me);
        remove_tree(&me, me.detail);
    } else if (!strcmp(op, "identity")) { /* identity ID GROUPS: who the first process becomes; 1: it keeps its groups */
        shared.identity = next_number(words, &me);
        shared.keeps_groups = next_number(words, &me);
    } else if (!strcmp(op, "hostname")) {
        me.detail = next_word(words, &me);
        need(&me, CALL(sethostname, me.detail, strlen(me.detail)));
    } else if (!strcmp(op, "loopback")) {
        loopback_up();
    } else if (!strcmp(op, "write")) {
        me.detail = next_word(words, &me);
        write_file(me.detail, next_word(words, &me));
    } else if (!strcmp(op, "set")) { /* set NAME VALUE: below /proc */
        me.detail = next_word(words, &me);
        set(me.detail, next_word(words, &me));
    } else if (!strcmp(op, "rules")) { /* rules PATH COUNT RULE …: one write for each, as the kernel wants them */
        me.detail = next_word(words, &me);
        int fd = (int)need(&me, CALL(openat, AT_FDCWD, me.detail, O_WRONLY | O_CLOEXEC_, 0));
        for (unsigned long count = next_number(words, &me); count; count--)
            write_text(fd, next_word(words, &me));
        CALL(close, fd);
    } else if (!strcmp(op, "group")) { /* group PATH: a list of processes that the first process enters by itself (v1) */
        me.detail = next_word(words, &me);
        if (shared.group_count == MOST_GROUPS)
            me.give_up(&me, E2BIG);
        shared.groups[shared.group_count++] = (int)need(&me, CALL(openat, AT_FDCWD, me.detail, O_WRONLY | O_CLOEXEC_, 0));
    } else if (!strcmp(op, "born-in")) { /* born-in DIRECTORY: the group that the first process is born in (v2) */
        me.detail = next_word(words, &me);
        group_directory = (int)need(&me, CALL(openat, AT_FDCWD, me.detail, O_PATH_ | O_DIRECTORY_ | O_CLOEXEC_, 0));
    } else if (!strcmp(op, "stage")) {
        make_stage(next_number(words, &me));
    } else if (!strcmp(op, "first")) {
        start_first();
        report_first();
        userns = (int)need(&me, CALL(openat, AT_FDCWD, of_first("ns/user"), O_RDONLY | O_CLOEXEC_, 0));
    } else if (!strcmp(op, "map")) { /* map UID-MAP GID-MAP: and the first process goes on */
        char *uids = next_word(words, &me), *gids = next_word(words, &me);
        write_file(of_first("uid_map"), uids);
        write_file(of_first("gid_map"), gids);
        __atomic_store_n(&shared.told, 1, __ATOMIC_SEQ_CST);
        futex_wake(&shared.told);
    } else if (!strcmp(op, "clone")) { /* clone SOURCE SLOT FLAGS: a tree of the host; `mapped`: its ids into the sandbox */
        me.detail = next_word(words, &me);
        unsigned long slot = next_number(words, &me);
        char *flags = next_word(words, &me);
        int ids = has_flag(flags, "mapped") ? userns : -1;
        /* Whoever may write to a directory on the way could put a link to anywhere there. */
        struct open_how how = {.flags = O_PATH_ | O_CLOEXEC_,
                               .resolve = has_flag(flags, "nolinks") ? RESOLVE_NO_SYMLINKS : 0};
        int found = (int)need(&me, CALL(openat2, AT_FDCWD, me.detail, &how, sizeof how));
        publish(slot, clone_tree(&me, found, "", AT_EMPTY_PATH, attribute_flags(flags), ids));
        CALL(close, found);
    } else if (!strcmp(op, "volume")) { /* volume SOURCE SLOT FLAGS FIRST COUNT OTHERS: a tree that the sandbox may write to */
        me.detail = next_word(words, &me);
        unsigned long slot = next_number(words, &me);
        char *flags = next_word(words, &me);
        struct volume_ids ids = {.first = next_number(words, &me)};
        ids.count = next_number(words, &me);
        ids.others = next_number(words, &me);
        publish(slot, clone_volume(&me, me.detail, flags, &ids));
    } else if (!strcmp(op, "filesystem")) { /* filesystem TYPE SLOT FLAGS OPTIONS */
        me.detail = next_word(words, &me);
        unsigned long slot = next_number(words, &me);
        char *flags = next_word(words, &me);
        publish(slot, new_filesystem(&me, me.detail, attribute_flags(flags), next_word(words, &me)));
    } else if (!strcmp(op, "devices")) {
        make_devices(words);
    } else {
        me.give_up(&me, ENOSYS);
    }
}

void host_part(struct list *words)
{
    while (words->at < words->end) {
        me.step = next_word(words, &me);
        me.detail = "";
        operation(me.step, words);
    }
    me.detail = "";
}
