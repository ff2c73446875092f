/* The host part: steps that need root of the host, or an ordinary user in its own namespace. */
#include <linux/prctl.h>

#include "sandbox.h"

enum { STACK = 64 << 10 };

static struct worker me = {.step = "start", .detail = "", .give_up = launcher_gives_up};

int first_pid;
static int userns = -1; /* of the first process */
static int group_directory = -1;
static char stack[STACK] __attribute__((aligned(16)));

/* Start the first process. It shares memory and descriptors with this one until it executes the agent: nothing is copied, and it can
 * report why it failed. It has new user, PID and mount namespaces; network, IPC and UTS are the launcher's, owned by the host. */
static void start_first(void)
{
    struct clone_args arguments = {
        .flags = CLONE_VM | CLONE_FILES | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID,
        .child_tid = (uint64_t)(uintptr_t)&shared.alive,
        .exit_signal = CHILD_SIGNAL,
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
    report_first();
    userns = (int)need(&me, CALL(openat, AT_FDCWD, proc_path((unsigned long)first_pid, "ns/user").bytes, O_RDONLY | O_CLOEXEC, 0));
}

static void map_ids(void)
{
    char *users = next_word(&me), *groups = next_word(&me);
    write_file(&me, proc_path((unsigned long)first_pid, "uid_map").bytes, users);
    write_file(&me, proc_path((unsigned long)first_pid, "gid_map").bytes, groups);
    __atomic_store_n(&shared.told, 1, __ATOMIC_SEQ_CST);
    futex_wake(&shared.told);
}

/* Enter the user namespace in which an ordinary user is root, and a mount namespace that belongs to it. There is no more right over
 * the host there than that user has. */
static void enter(int namespace)
{
    need(&me, CALL(setns, namespace, CLONE_NEWUSER));
    CALL(close, namespace);
    /* Otherwise the process's files in /proc would belong to the host's root, among them the id maps of the first process. */
    need(&me, CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0));
    need(&me, CALL(unshare, CLONE_NEWNS));
    need(&me, CALL(mount, NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
}

static void write_rules(const char *path)
{
    int fd = (int)need(&me, CALL(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0));
    for (unsigned long count = next_number(&me); count; count--)
        write_text(&me, fd, next_word(&me));
    CALL(close, fd);
}

static void keep_group(const char *path)
{
    if (shared.group_count == MAX_GROUPS)
        me.give_up(&me, E2BIG);
    shared.groups[shared.group_count++] = (int)need(&me, CALL(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0));
}

static void operation(const char *op)
{
    if (!strcmp(op, "enter")) { /* enter FD */
        enter((int)next_number(&me));
    } else if (!strcmp(op, "ready")) { /* ready: report that all steps up to here are done */
        report_ready();
    } else if (!strcmp(op, "remove")) { /* remove PATH: a tree whose files may belong to any mapped id */
        remove_tree(&me, next_subject(&me));
    } else if (!strcmp(op, "identity")) { /* identity ID GROUPS: the ids of the first process; GROUPS 1: it keeps its groups */
        shared.identity = next_number(&me);
        shared.keeps_groups = next_number(&me);
    } else if (!strcmp(op, "write")) { /* write PATH TEXT */
        const char *path = next_subject(&me);
        write_file(&me, path, next_word(&me));
    } else if (!strcmp(op, "rules")) { /* rules PATH COUNT RULE …: the kernel requires one write for each rule */
        write_rules(next_subject(&me));
    } else if (!strcmp(op, "group")) { /* group PATH: a list of processes that the first process joins by itself (v1) */
        keep_group(next_subject(&me));
    } else if (!strcmp(op, "born-in")) { /* born-in DIRECTORY: the group in which the first process is created (v2) */
        group_directory = (int)need(&me, CALL(openat, AT_FDCWD, next_subject(&me), O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
    } else if (!strcmp(op, "first")) {
        start_first();
    } else if (!strcmp(op, "map")) { /* map UID-MAP GID-MAP: afterwards the first process continues */
        map_ids();
    } else if (!host_operation(&me, op, userns)) {
        me.give_up(&me, ENOSYS);
    }
}

void host_part(char *words, char *end)
{
    for (me.at = words, me.end = end; me.at < me.end;) {
        me.step = next_word(&me);
        me.detail = "";
        operation(me.step);
    }
    me.detail = "";
}
