/* The first process: from an empty machine to the agent. It is root of the sandbox's user namespace, which is nobody outside, so
 * a mistake here reaches nothing that the sandbox could not reach by itself. */
#include <linux/capability.h>
#include <linux/fcntl.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/resource.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/stat.h>
#include <linux/uio.h>

#include "native.h"

enum { O_PATH_ = 010000000, O_CLOEXEC_ = 02000000, O_DIRECTORY_ = 0200000, O_NOFOLLOW_ = 0400000 };
enum { MS_PRIVATE_ = 1 << 18, MS_REC_ = 1 << 14, MNT_DETACH_ = 2, SIGKILL_ = 9, TYPE_MISMATCH = EINVAL, OUTSIDER = 65534 };
enum { LISTENER = 3, AGENT = 4, GUARD = 5, SOL_SOCKET_ = 1, SCM_RIGHTS_ = 1, MSG_NOSIGNAL_ = 0x4000 };

static _Noreturn void give_up(struct worker *worker, long error)
{
    (void)worker;
    shared.error = error;
    for (;;)
        CALL(exit_group, 125);
}

#define me shared.inside
static int root = -1;                   /* the sandbox's root directory; paths of the image resolve below it */
static int base = -1;                   /* the mount whose paths are covered */
static struct list *words = &shared.early;
static int covers[2] = {-1, -1};        /* an empty file and an empty directory, not yet used */
static char *arguments[MOST_STRINGS], *environment[MOST_STRINGS];
static int argument_count, variable_count;

static char *word(void)
{
    return next_word(words, &me);
}

static int slot(void)
{
    unsigned long number = next_number(words, &me);
    if (number >= MOST_SLOTS)
        give_up(&me, EINVAL);
    int found;
    while (!(found = __atomic_load_n(&shared.slots[number], __ATOMIC_SEQ_CST)))
        futex_wait(&shared.slots[number], 0);
    return found - 1;
}

/* If the launcher dies, so do we: nobody would ever tell us to go on. */
static void die_with_launcher(void)
{
    need(&me, CALL(prctl, PR_SET_PDEATHSIG, SIGKILL_, 0, 0, 0));
    struct pollfd launcher = {.fd = shared.launcher, .events = POLLIN};
    long timeout[2] = {0, 0};
    if (CALL(ppoll, &launcher, 1, timeout, NULL, 0) != 0)
        CALL(exit_group, 125);
}

static void become_itself(void)
{
    unsigned long id = shared.identity;
    if (!shared.keeps_groups)
        need(&me, CALL(setgroups, 0, NULL));
    need(&me, CALL(setresgid, id, id, id));
    need(&me, CALL(prctl, PR_SET_SECUREBITS, 1 << 2 | 1 << 4, 0, 0, 0)); /* capabilities stay, whoever it becomes */
    need(&me, CALL(setresuid, id, id, id));
    need(&me, CALL(prctl, PR_SET_SECUREBITS, 0, 0, 0, 0));
    CALL(umask, 022);
}

/* The stage goes over the root directory of the copied mount table, and we stand in it. It holds what is mounted until the new
 * root takes its place. */
static void enter_stage(int stage)
{
    need(&me, CALL(mount, NULL, "/", NULL, MS_REC_ | MS_PRIVATE_, NULL));
    need(&me, attach(stage, AT_FDCWD, "/"));
    need(&me, CALL(fchdir, stage));
    for (int kind = 0; kind < 2; kind++) {
        const char *name = kind ? "null-directory" : "null";
        int tree = clone_tree(&me, AT_FDCWD, name, 0, attribute_flags("ro,nosuid,nodev,noexec"), -1);
        need(&me, attach(tree, AT_FDCWD, name));
        CALL(close, tree);
    }
}

/* cover PATH: nothing is seen there any more. What does not exist needs no cover. */
static void cover(const char *path)
{
    for (int kind = 0; kind < 2; kind++) {
        if (covers[kind] < 0)
            covers[kind] = clone_tree(&me, AT_FDCWD, kind ? "null-directory" : "null", 0, 0, -1);
        long error = attach(covers[kind], base, path);
        if (error == -TYPE_MISMATCH && kind == 0)
            continue;
        if (error == -ENOENT)
            return;
        need(&me, error);
        CALL(close, covers[kind]);
        covers[kind] = -1;
        return;
    }
}

/* shadow NAME PATH CONTENT: a file of the kernel that shows this text and takes none. */
static void shadow(const char *name)
{
    char *path = word(), *content = word();
    int file = (int)need(&me, CALL(openat, AT_FDCWD, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC_, 0444));
    if ((size_t)need(&me, CALL(write, file, content, strlen(content))) != strlen(content))
        give_up(&me, EINVAL);
    CALL(close, file);
    int tree = clone_tree(&me, AT_FDCWD, name, 0, attribute_flags("ro,nosuid,nodev,noexec"), -1);
    need(&me, attach(tree, base, path));
    CALL(close, tree);
}

/* A detached mount goes to its place inside the root. */
static void put(int mount, const char *target, bool strict)
{
    int at = mount_point(&me, root, target, is_directory(&me, mount), strict);
    need(&me, attach(mount, at, ""));
    CALL(close, at);
}

static void directory(const char *path) /* directory PATH MODE: made if it is missing, else left as it is */
{
    unsigned long mode = next_number(words, &me);
    int at = open_inside(root, path, 0, O_PATH_ | O_DIRECTORY_);
    if (at == -ENOENT) {
        at = mount_point(&me, root, path, true, false);
        int readable = (int)need(&me, CALL(openat, at, ".", O_RDONLY | O_DIRECTORY_ | O_CLOEXEC_, 0));
        need(&me, CALL(fchmod, readable, mode));
        CALL(close, readable);
    }
    need(&me, at);
    CALL(close, at);
}

/* The overlay covers the stage, and the directory below its top becomes our root: what is above cannot be named, and no mount
 * table names the overlay. */
static void change_root(void)
{
    need(&me, CALL(move_mount, AT_FDCWD, me.detail, AT_FDCWD, "/", 0));
    need(&me, CALL(fchdir, root));
    need(&me, CALL(chroot, "."));
}

static void keep_only(uint64_t keep)
{
    for (int capability = 0; capability < 64; capability++) {
        if (keep >> capability & 1)
            continue;
        long error = CALL(prctl, PR_CAPBSET_DROP, capability, 0, 0, 0);
        if (error == -EINVAL) /* the kernel knows no more */
            break;
        need(&me, error);
    }
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)keep, .permitted = (uint32_t)keep},
        {.effective = (uint32_t)(keep >> 32), .permitted = (uint32_t)(keep >> 32)},
    };
    need(&me, CALL(capset, &header, data));
}

/* The agent's descriptors: 0 to 2 the sandbox's own /dev/null, 3 the listening socket, nothing else. */
static void arrange_descriptors(void)
{
    need(&me, CALL(unshare, CLONE_FILES));
    int null = (int)need(&me, CALL(openat, AT_FDCWD, "/dev/null", O_RDWR | O_NOFOLLOW_ | O_CLOEXEC_, 0));
    /* Both may lie on a number that is about to be overwritten. */
    int listener = (int)need(&me, CALL(fcntl, shared.listener, F_DUPFD_CLOEXEC, 16));
    int agent = (int)need(&me, CALL(fcntl, shared.agent, F_DUPFD_CLOEXEC, 16));
    int guard = shared.guard < 0 ? -1 : (int)need(&me, CALL(fcntl, shared.guard, F_DUPFD_CLOEXEC, 16));
    for (int fd = 0; fd < 3; fd++)
        need(&me, CALL(dup3, null, fd, 0));
    need(&me, CALL(dup3, listener, LISTENER, 0));
    need(&me, CALL(dup3, agent, AGENT, O_CLOEXEC_));
    if (guard >= 0)
        need(&me, CALL(dup3, guard, GUARD, O_CLOEXEC_));
    need(&me, CALL(close_range, guard >= 0 ? GUARD + 1 : AGENT + 1, ~0u, 0));
}

/* The filter's listener goes to the supervisor; nobody inside keeps it. */
static void hand_over(int listener)
{
    struct {
        size_t length;
        int level, type, fd, padding;
    } rights = {.length = sizeof(size_t) + 3 * sizeof(int), .level = SOL_SOCKET_, .type = SCM_RIGHTS_, .fd = listener};
    struct iovec part = {"", 1};
    struct {
        void *name;
        int name_length;
        struct iovec *parts;
        size_t part_count;
        void *control;
        size_t control_length;
        int flags;
    } message = {.parts = &part, .part_count = 1, .control = &rights, .control_length = sizeof rights};
    need(&me, CALL(sendmsg, GUARD, &message, MSG_NOSIGNAL_));
    CALL(close, listener);
    CALL(close, GUARD);
}

static _Noreturn void execute(uint64_t capabilities)
{
    me.step = "wait for the host";
    while (!__atomic_load_n(&shared.host_done, __ATOMIC_SEQ_CST))
        futex_wait(&shared.host_done, 0);
    arrange_descriptors();
    me.step = "capabilities";
    keep_only(capabilities);
    need(&me, CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    need(&me, CALL(prctl, PR_SET_PDEATHSIG, 0, 0, 0, 0));
    me.step = "seccomp";
    struct sock_fprog program = {.len = (unsigned short)(shared.filter_bytes / sizeof(struct sock_filter)),
                                 .filter = (struct sock_filter *)(void *)shared.filter};
    bool guarded = shared.guard >= 0;
    long listener = need(&me, CALL(seccomp, SECCOMP_SET_MODE_FILTER, guarded ? SECCOMP_FILTER_FLAG_NEW_LISTENER : 0, &program));
    if (guarded)
        hand_over((int)listener);
    me.step = "execute";
    shared.executing = 1;
    need(&me, CALL(execveat, AGENT, "", arguments, environment, AT_EMPTY_PATH));
    give_up(&me, EINVAL);
}

static void keep_string(char **list, int *count, char *text)
{
    if (*count == MOST_STRINGS - 1)
        give_up(&me, E2BIG);
    list[(*count)++] = text;
}

/* An overlay looks at its layers with the rights of whoever mounted it. `outsider`: of one who owns nothing, so that what is the host's
 * root's alone stays closed to everybody inside, also to root. */
static void mount_overlay(const char *target, const char *flags, const char *options)
{
    bool outsider = has_flag(flags, "outsider");
    if (outsider) { /* with the id go the capabilities about files, and they come back with it */
        CALL(setfsgid, OUTSIDER);
        CALL(setfsuid, OUTSIDER);
        if (CALL(setfsuid, OUTSIDER) != OUTSIDER) /* it answers what it was before */
            give_up(&me, EPERM);
    }
    long result = CALL(mount, "overlay", target, "overlay", attribute_flags(flags), options);
    if (outsider) {
        CALL(setfsuid, 0);
        CALL(setfsgid, 0);
    }
    need(&me, result);
}

static void file_operation(const char *op)
{
    if (!strcmp(op, "proc")) { /* proc NAME FLAGS: staged, so that it can be covered before it is placed */
        char none[] = "";
        base = new_filesystem(&me, "proc", attribute_flags(word()), none);
        need(&me, attach(base, AT_FDCWD, me.detail));
    } else if (!strcmp(op, "leave")) { /* leave NAME: the host's mounts, for the stage; a new /proc needs an old one in sight */
        need(&me, CALL(pivot_root, ".", "."));
        need(&me, CALL(umount2, ".", MNT_DETACH_));
        need(&me, CALL(chdir, "/"));
    } else if (!strcmp(op, "sys")) { /* sys NAME SLOT: in the same way */
        base = slot();
        need(&me, attach(base, AT_FDCWD, me.detail));
    } else if (!strcmp(op, "base")) { /* base NAME: what is covered from now on lies below it */
        base = (int)need(&me, CALL(openat, AT_FDCWD, me.detail, O_PATH_ | O_DIRECTORY_ | O_CLOEXEC_, 0));
    } else if (!strcmp(op, "cover")) {
        cover(me.detail);
    } else if (!strcmp(op, "shadow")) {
        shadow(me.detail);
    } else if (!strcmp(op, "mkdir")) {
        need(&me, CALL(mkdirat, AT_FDCWD, me.detail, 0755));
    } else if (!strcmp(op, "stage")) { /* stage NAME SLOT */
        need(&me, CALL(mkdirat, AT_FDCWD, me.detail, 0755));
        int mount = slot();
        need(&me, attach(mount, AT_FDCWD, me.detail));
    } else if (!strcmp(op, "overlay")) { /* overlay NAME FLAGS OPTIONS: relative directories, no path of the host */
        char *flags = word();
        mount_overlay(me.detail, flags, word());
    } else if (!strcmp(op, "root")) {
        root = (int)need(&me, CALL(openat, AT_FDCWD, me.detail, O_PATH_ | O_DIRECTORY_ | O_NOFOLLOW_ | O_CLOEXEC_, 0));
    } else if (!strcmp(op, "put")) { /* put TARGET SLOT FLAGS */
        int mount = slot();
        put(mount, me.detail, has_flag(word(), "strict"));
    } else if (!strcmp(op, "move")) { /* move TARGET NAME: what is staged under NAME */
        int at = mount_point(&me, root, me.detail, true, true);
        need(&me, CALL(move_mount, AT_FDCWD, word(), at, "", MOVE_MOUNT_T_EMPTY_PATH));
        CALL(close, at);
    } else if (!strcmp(op, "mount")) { /* mount TARGET TYPE FLAGS OPTIONS */
        char *type = word(), *flags = word();
        put(new_filesystem(&me, type, attribute_flags(flags), word()), me.detail, true);
    } else if (!strcmp(op, "directory")) {
        directory(me.detail);
    } else if (!strcmp(op, "cover-all")) { /* cover-all NAME: by the staged overlay */
        change_root();
    } else {
        give_up(&me, ENOSYS);
    }
}

static uint64_t hexadecimal(const char *text)
{
    uint64_t value = 0;
    for (; *text; text++)
        value = value << 4 | (uint64_t)(*text <= '9' ? *text - '0' : (*text | 32) - 'a' + 10);
    return value;
}

static void operation(const char *op)
{
    me.detail = word();
    if (!strcmp(op, "argument")) {
        keep_string(arguments, &argument_count, (char *)me.detail);
    } else if (!strcmp(op, "variable")) {
        keep_string(environment, &variable_count, (char *)me.detail);
        me.detail = "";
    } else if (!strcmp(op, "rlimit")) { /* rlimit NAME NUMBER VALUE: soft and hard alike */
        unsigned long number = next_number(words, &me), value = next_number(words, &me);
        struct rlimit64 limit = {.rlim_cur = value, .rlim_max = value};
        need(&me, CALL(prlimit64, 0, number, &limit, NULL));
    } else if (!strcmp(op, "cwd")) {
        char here[LONGEST_PATH];
        need(&me, CALL(chdir, me.detail));
        need(&me, CALL(getcwd, here, sizeof here));
        if (here[0] != '/')
            give_up(&me, ENOENT);
    } else if (!strcmp(op, "execute")) { /* execute CAPABILITIES */
        execute(hexadecimal(me.detail));
    } else {
        file_operation(op);
    }
}

/* What is the same for all sandboxes, before anything is known of this one: it has no ids yet, and is in no control group. */
static void begin(void)
{
    enter_stage(slot());
    while (words->at < words->end) {
        me.step = word();
        operation(me.step);
    }
    me.step = "wait", me.detail = "";
    while (!__atomic_load_n(&shared.told, __ATOMIC_SEQ_CST))
        futex_wait(&shared.told, 0);
    words = &shared.words;
}

_Noreturn void first_process(void)
{
    me = (struct worker){.step = "begin", .detail = "", .give_up = give_up};
    die_with_launcher();
    begin();
    /* From here on it is found by its control group and belongs to the sandbox. If that was removed meanwhile, this fails. */
    me.step = "join the control group";
    for (int i = 0; i < shared.group_count; i++)
        need(&me, CALL(write, shared.groups[i], "0", 1));
    me.step = "namespaces";
    become_itself();
    need(&me, CALL(unshare, CLONE_NEWCGROUP)); /* only now: the group it is in is the top of what it will see */
    CALL(setsid);
    for (;;) {
        me.step = word();
        operation(me.step);
    }
}
