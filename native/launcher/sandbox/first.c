/* The first process of a sandbox: assembles its file tree and executes the agent. */
#include <linux/filter.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/resource.h>

#include "sandbox.h"

enum { LISTENER = 3, AGENT = 4, GUARD = 5 };
enum { KEEP_CAPABILITIES = 1 << 2 /* SECBIT_NO_SETUID_FIXUP */ | 1 << 4 /* SECBIT_KEEP_CAPS */ };

static __attribute__((noreturn)) void give_up(struct worker *worker, long error)
{
    (void)worker;
    shared.error = error;
    for (;;)
        CALL(exit_group, 125);
}

#define me shared.inside
static struct tree tree = NO_TREE;
static char *arguments[MAX_STRINGS], *environment[MAX_STRINGS];
static int argument_count, variable_count;

/* End this process if the launcher dies, because it would otherwise wait forever. */
static void die_with_launcher(void)
{
    need(&me, CALL(prctl, PR_SET_PDEATHSIG, KILL_SIGNAL, 0, 0, 0));
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
    need(&me, CALL(prctl, PR_SET_SECUREBITS, KEEP_CAPABILITIES, 0, 0, 0)); /* keep the capabilities when the ids change */
    need(&me, CALL(setresuid, id, id, id));
    need(&me, CALL(prctl, PR_SET_SECUREBITS, 0, 0, 0, 0));
    CALL(umask, 022);
}

/* Replace the host's mounts by the stage. This comes after mounting /proc, which requires that an old /proc is visible. */
static void leave_host(void)
{
    need(&me, CALL(pivot_root, ".", "."));
    need(&me, CALL(umount2, ".", DETACH_MOUNT));
    need(&me, CALL(chdir, "/"));
}

/* Mount /proc on the stage, where parts of it can be covered before it is moved into the root. */
static void stage_proc(const char *name)
{
    char none[] = "";
    tree.base = new_filesystem(&me, "proc", attribute_flags(next_word(&me)), none);
    need(&me, attach(tree.base, AT_FDCWD, name));
}

/* Set up the agent's descriptors: 0 to 2 the sandbox's own /dev/null, 3 the listening socket, no others. */
static void arrange_descriptors(void)
{
    need(&me, CALL(unshare, CLONE_FILES));
    int null = (int)need(&me, CALL(openat, AT_FDCWD, "/dev/null", O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0));
    /* Both may have a number that is about to be overwritten. */
    int listener = (int)need(&me, CALL(fcntl, shared.listener, F_DUPFD_CLOEXEC, 16));
    int agent = (int)need(&me, CALL(fcntl, shared.agent, F_DUPFD_CLOEXEC, 16));
    int guard = shared.guard < 0 ? -1 : (int)need(&me, CALL(fcntl, shared.guard, F_DUPFD_CLOEXEC, 16));
    for (int fd = 0; fd < 3; fd++)
        need(&me, CALL(dup3, null, fd, 0));
    need(&me, CALL(dup3, listener, LISTENER, 0));
    need(&me, CALL(dup3, agent, AGENT, O_CLOEXEC));
    if (guard >= 0)
        need(&me, CALL(dup3, guard, GUARD, O_CLOEXEC));
    need(&me, CALL(close_range, guard >= 0 ? GUARD + 1 : AGENT + 1, ~0u, 0));
}

static _Noreturn void execute(uint64_t capabilities)
{
    me.step = "wait for the host";
    while (!__atomic_load_n(&shared.host_done, __ATOMIC_SEQ_CST))
        futex_wait(&shared.host_done, 0);
    arrange_descriptors();
    me.step = "capabilities";
    keep_only(&me, capabilities);
    need(&me, CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    need(&me, CALL(prctl, PR_SET_PDEATHSIG, 0, 0, 0, 0));
    me.step = "seccomp";
    install_filter(&me, shared.filter, shared.filter_bytes, shared.guard < 0 ? -1 : GUARD);
    me.step = "execute";
    shared.executing = 1;
    need(&me, CALL(execveat, AGENT, "", arguments, environment, AT_EMPTY_PATH));
    give_up(&me, EINVAL);
}

static void keep_string(char **list, int *count, char *text)
{
    if (*count == MAX_STRINGS - 1)
        give_up(&me, E2BIG);
    list[(*count)++] = text;
}

static void limit(void)
{
    unsigned long number = next_number(&me), value = next_number(&me);
    struct rlimit64 both = {.rlim_cur = value, .rlim_max = value};
    need(&me, CALL(prlimit64, 0, number, &both, NULL));
}

static void operation(const char *op)
{
    me.detail = "";
    if (!strcmp(op, "proc")) { /* proc NAME FLAGS: the /proc of this PID namespace */
        stage_proc(next_subject(&me));
    } else if (!strcmp(op, "leave")) { /* leave: the stage becomes the root directory */
        leave_host();
    } else if (!strcmp(op, "cover-all")) { /* cover-all NAME: move the staged overlay over the root, so that no mount table shows it */
        need(&me, CALL(move_mount, AT_FDCWD, next_subject(&me), AT_FDCWD, "/", 0));
    } else if (!strcmp(op, "argument")) {
        keep_string(arguments, &argument_count, next_subject(&me));
    } else if (!strcmp(op, "variable")) {
        keep_string(environment, &variable_count, next_word(&me));
    } else if (!strcmp(op, "rlimit")) { /* rlimit NAME NUMBER VALUE: sets the soft and the hard limit */
        next_subject(&me);
        limit();
    } else if (!strcmp(op, "execute")) { /* execute CAPABILITIES */
        execute(next_number(&me));
    } else if (!inside_operation(&me, &tree, op)) {
        give_up(&me, ENOSYS);
    }
}

/* The part that is the same for all sandboxes, executed before the spec is known: without ids and outside of any control group. */
static void begin(void)
{
    need(&me, CALL(mount, NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
    while (me.at < me.end) {
        me.step = next_word(&me);
        operation(me.step);
    }
    me.step = "wait", me.detail = "";
    while (!__atomic_load_n(&shared.told, __ATOMIC_SEQ_CST))
        futex_wait(&shared.told, 0);
    me.at = shared.words;
    me.end = shared.words_end;
}

_Noreturn void first_process(void)
{
    me.step = "begin", me.give_up = give_up;
    die_with_launcher();
    begin();
    /* From here on, the process belongs to the sandbox, which is found by its control group. If that was removed, joining fails. */
    me.step = "join the control group";
    for (int i = 0; i < shared.group_count; i++)
        need(&me, CALL(write, shared.groups[i], "0", 1));
    me.step = "namespaces";
    become_itself();
    need(&me, CALL(unshare, CLONE_NEWCGROUP)); /* only now, because the current group becomes the top of the hierarchy that it sees */
    CALL(setsid);
    for (;;) {
        me.step = next_word(&me);
        operation(me.step);
    }
}
