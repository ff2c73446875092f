/* atoll-mount prepare: the host phase and the sandbox phase, then the OCI runtime (see main.c). */
#include <linux/prctl.h>

#include "runtime.h"

enum { MAX_JOINS = 16 };

static struct tree tree = NO_TREE;
static int userns = -1; /* the sandbox's */
static int guard_filter = -1, guard_channel = -1;

/* Children that add this process to control groups. The kernel makes the writer wait for all CPUs, so a child writes while this process
 * continues; it waits for the children before it executes the OCI runtime. */
static long joining[MAX_JOINS];
static int joins;

static void join_group(const char *list)
{
    struct text us = {.length = 0};
    if (joins == MAX_JOINS)
        me.give_up(&me, E2BIG);
    add_number(&us, (unsigned long)CALL(getpid));
    long child = need(&me, fork_process());
    if (child == 0) {
        need(&me, CALL(prctl, PR_SET_PDEATHSIG, KILL_SIGNAL, 0, 0, 0));
        write_file(&me, list, us.bytes);
        leave(0);
    }
    joining[joins++] = child;
}

static void wait_until_joined(void)
{
    int status = 0;
    for (int i = 0; i < joins; i++) {
        need(&me, CALL(wait4, joining[i], &status, 0, NULL));
        if (status)
            leave(125); /* the child has reported the reason */
    }
}

/* Create a path through which the OCI runtime joins the sandbox's user namespace. */
static void keep_namespace(const char *name)
{
    int flags = O_CREAT | O_WRONLY | O_CLOEXEC | O_EXCL;
    struct text path = {.length = 0};
    add(&path, "/proc/self/fd/");
    add_number(&path, (unsigned long)userns);
    long file = need(&me, CALL(openat, AT_FDCWD, name, flags, 0600));
    CALL(close, file);
    need(&me, CALL(mount, path.bytes, name, NULL, MS_BIND, NULL));
}

static void unmount(const char *path)
{
    long error = CALL(umount2, path, DETACH_MOUNT);
    if (error != -EINVAL && error != -ENOENT)
        need(&me, error);
}

static void in_host_room(const char *op)
{
    if (!strcmp(op, "userns")) { /* userns UID-MAP GID-MAP: the sandbox's user namespace */
        char *users = next_word(&me);
        userns = mapped_namespace(&me, users, next_word(&me));
    } else if (!strcmp(op, "group")) { /* group PATH: a list of processes that this process joins */
        join_group(next_subject(&me));
    } else if (!strcmp(op, "umount")) {
        unmount(next_subject(&me));
    } else if (!strcmp(op, "hide")) { /* hide DIRECTORY: the OCI runtime must not see its content */
        unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
        need(&me, CALL(mount, "hidden", next_subject(&me), "tmpfs", flags, "size=4k"));
    } else if (!strcmp(op, "let-go")) {
        let_go_of_loops();
    } else if (!strcmp(op, "guard")) { /* guard FILTER SOCKET: the OCI runtime runs under a filter with a supervisor */
        guard_filter = (int)next_number(&me);
        guard_channel = (int)next_number(&me);
    } else if (!strcmp(op, "enter-stage")) { /* enter-stage PATH SLOT: later mounts are staged there */
        const char *path = next_subject(&me);
        enter_stage(&me, path, take(&me, next_number(&me)));
    } else if (!strcmp(op, "keep-userns")) { /* keep-userns NAME: staged for the OCI runtime */
        keep_namespace(next_subject(&me));
    } else if (!host_operation(&me, op, userns)) {
        me.give_up(&me, ENOSYS);
    }
}

static _Noreturn void work_in_sandbox(int done, int leave_at)
{
    char byte;
    need(&me, CALL(prctl, PR_SET_PDEATHSIG, KILL_SIGNAL, 0, 0, 0));
    need(&me, CALL(setns, userns, CLONE_NEWUSER));
    need(&me, CALL(setresgid, 0, 0, 0));
    need(&me, CALL(setresuid, 0, 0, 0));
    CALL(umask, 022);
    need(&me, CALL(unshare, CLONE_NEWNS));
    while (me.at < me.end) {
        me.step = next_word(&me);
        me.detail = "";
        if (!inside_operation(&me, &tree, me.step))
            me.give_up(&me, ENOSYS);
    }
    need(&me, CALL(write, done, "", 1));
    need(&me, CALL(read, leave_at, &byte, 1));
    leave(0);
}

/* A child makes the sandbox's mount namespace and reports it; this process joins it while the child is alive. */
static void make_tree(void)
{
    int done[2], leave_at[2];
    char byte;
    need(&me, CALL(pipe2, done, O_CLOEXEC));
    need(&me, CALL(pipe2, leave_at, O_CLOEXEC));
    long child = need(&me, fork_process());
    if (child == 0) {
        CALL(close, leave_at[1]);
        work_in_sandbox(done[1], leave_at[0]);
    }
    CALL(close, done[1]);
    if (CALL(read, done[0], &byte, 1) != 1)
        leave(125); /* the child has reported the reason */
    me.step = "join", me.detail = "";
    int fd = (int)need(&me, CALL(openat, AT_FDCWD, proc_path((unsigned long)child, "ns/mnt").bytes, O_RDONLY | O_CLOEXEC, 0));
    need(&me, CALL(setns, fd, CLONE_NEWNS));
    CALL(close, fd);
    CALL(close, leave_at[1]);
    need(&me, CALL(wait4, child, NULL, 0, NULL));
    /* Make a copy that belongs to the host's user namespace: its mounts are locked for processes with all rights in the sandbox's user
     * namespace, so read-only mounts stay read-only. */
    need(&me, CALL(unshare, CLONE_NEWNS));
}

_Noreturn void prepare(int list, char **command, char **environment)
{
    need(&me, CALL(close_range, list, ~0u, CLOSE_AT_EXECUTION));
    load_words(list);
    CALL(umask, 0); /* so that files get exactly the modes of the plan */
    while (me.at < me.end) {
        me.step = next_word(&me);
        me.detail = "";
        if (!strcmp(me.step, "inside")) { /* inside: the following words are executed in the sandbox phase */
            make_tree();
            break;
        }
        in_host_room(me.step);
    }
    me.step = "group";
    wait_until_joined();
    CALL(umask, 022);
    need(&me, CALL(chdir, "/"));
    if (guard_filter >= 0)
        install_filter_from(guard_filter, guard_channel);
    me.step = "execute", me.detail = command[0];
    need(&me, CALL(execve, command[0], command, environment));
    me.give_up(&me, EINVAL);
}
