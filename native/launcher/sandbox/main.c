/*
 * atoll-native: makes a sandbox, from nothing to the agent as its first process, and ends.
 *
 * Theory of operation
 *
 * Two processes in one memory. The launcher (main.c, host.c) is root of the host; it never resolves a path of the image. The
 * first process (first.c) is root of the sandbox's user namespace, which is nobody outside, and puts everything together; at the
 * end it executes the agent. They work side by side: the launcher makes mounts that need the host's rights as descriptors, the
 * first process takes each when it needs it. They share memory and descriptors (CLONE_VM, CLONE_FILES), so nothing is copied and
 * the first process can say why it failed; both end at execve, by the kernel.
 *
 * Descriptor 3 is a stream socket. Over it come frames: a length, then as many bytes of words. What the words mean is said where
 * they are executed; which there are is decided by launcher_protocol.py from the plan, and nothing is decided here.
 *
 *   1. host, early      namespaces of the host, the stage, the first process, sysfs
 *   2. inside, early    /proc and /sys, covered; then the host's mounts are left
 *   3. host             the control group, the id maps, id-mapped clones of the layers, devices; with it come two descriptors: the
 *                       listening socket and the agent's file; and a third for a sandbox that has a writable volume, the socket
 *                       of the supervisor that decides about set-id bits (../runtime/supervisor.c)
 *   4. inside           overlay, mounts, root, limits, arguments
 *   5. the seccomp program
 *
 * 1 and 2 are the same for all sandboxes: a launcher can be kept waiting with them done. If the socket closes before all is
 * there, it ends, and nothing was made. The answer is `first PID` as soon as there is a first process, and then one more line:
 * `ok`, `failed ERRNO STEP DETAIL` or `killed STEP`. Nobody needs to wait for `ok`: the agent answers by itself.
 *
 * Namespaces. unshare(NEWNET|NEWIPC|NEWUTS) by the launcher: they belong to the host, so root inside has no power over them.
 * clone3(NEWUSER|NEWPID|NEWNS): these belong to the sandbox, which needs them to mount an overlay and /proc. NEWCGROUP by the
 * first process, once it is in its group, which then is the top that it sees.
 *
 * Ordinary users. All of this works without rights on the host: `enter` joins a user namespace in which the user has them, made once
 * for all its launchers (native/ordinary.py), and a mount namespace that belongs to it. There it is as root of the host is here, with
 * these differences: layers keep the ids they have on the disk; devices are the host's own, attached one by one; there is no control
 * group, so the first process is found by its number, which is written down before it is told to go on.
 *
 * Mounts. tmpfs (the stage): what is mounted must lie somewhere before the root does; its empty file and directory cover what
 * the kernel tells about the machine. proc: of the new PID namespace. sysfs, mqueue: of namespaces that the host owns, so the
 * launcher makes them. Clones of layers, /usr and volumes, with ids mapped: no file is copied or chowned. overlay: in the
 * sandbox's own mount namespace, so it goes with it; `volatile`, so going costs no sync. tmpfs with device nodes: only the host's
 * root can make nodes, and only the listed ones exist. devpts, tmpfs on /dev/shm: the sandbox's own. pivot_root to the stage, and the
 * host's mounts are gone: a waiting launcher holds none. At the end the overlay is moved over the stage, and a chroot to the
 * directory below its top keeps it out of every mount table. That is no pivot_root, which would look at every process of the
 * machine: below the overlay there is nothing but what it is made of.
 *
 * Capabilities. The first process has all of its user namespace until it drops all but those of the plan from every set, the
 * bounding set included; then no_new_privs and the filter, and nothing but execveat after it.
 *
 * No Landlock. It restricts which files of a process's own tree it may use, and what is not in the sandbox's tree is not in its mount
 * namespace either; for what is in it, root inside must have every right. What remains of it, that nobody changes mounts, is refused
 * by three walls already (no CAP_SYS_ADMIN in any set, no new user namespace, the filter), and it would be paid for at every open().
 * The launcher itself cannot have it: a process under Landlock may not mount.
 *
 * Whose is what. Until the first process joins its control group it belongs to the launcher and dies with it (PR_SET_PDEATHSIG, and
 * a pidfd for the case that the launcher died before that call). From then on it is found by its group. A group that was
 * removed meanwhile cannot be joined. So whatever is killed whenever, there is a sandbox in its group, or nothing.
 */
#include <linux/uio.h>

#include "sandbox.h"

struct shared shared;
static int channel = 3;
static char memory[MAX_LIST] __attribute__((aligned(16)));
static size_t used;

/* -- the report: lines, the last one `ok` or the step that failed, its detail and the error -- */

static void report(const struct text *line)
{
    CALL(sendto, channel, line->bytes, line->length, NO_SIGNAL, NULL, 0);
}

void report_first(void)
{
    struct text line = {.length = 0};
    add(&line, "first ");
    add_number(&line, (unsigned long)first_pid);
    add(&line, "\n");
    report(&line);
}

void report_ready(void)
{
    struct text line = {.length = 0};
    add(&line, "ready\n");
    report(&line);
}

static _Noreturn void end(const struct text *line, int status)
{
    report(line);
    for (;;)
        CALL(exit_group, status);
}

static _Noreturn void report_failure(const struct worker *worker, long error)
{
    struct text line = {.length = 0};
    add_failure(&line, worker, error);
    end(&line, 125);
}

__attribute__((noreturn)) void launcher_gives_up(struct worker *worker, long error)
{
    if (first_pid) {
        CALL(kill, first_pid, KILL_SIGNAL);
        CALL(wait4, first_pid, NULL, 0, NULL);
        /* It may have had a reason of its own, which is then the cause of ours. */
        if (shared.error)
            report_failure(&shared.inside, shared.error);
    }
    report_failure(worker, error);
}

static struct worker me = {.step = "read", .detail = "", .give_up = launcher_gives_up};

/* -- the words: frames of a length and as many bytes; descriptors come with the first byte of a frame -- */

static void keep_rights(struct rights *rights, size_t length)
{
    if (length < RIGHTS_HEADER || rights->level != SOCKET_LEVEL || rights->type != RIGHTS_TYPE)
        return;
    size_t count = (rights->length - RIGHTS_HEADER) / sizeof(int);
    if (count != 2 && count != 3)
        me.give_up(&me, EINVAL);
    shared.listener = rights->fds[0];
    shared.agent = rights->fds[1];
    shared.guard = count == 3 ? rights->fds[2] : -1;
}

static void receive(char *to, size_t length)
{
    while (length) {
        struct rights rights = {0};
        struct iovec part = {to, length};
        struct message message = {.parts = &part, .part_count = 1, .control = &rights, .control_length = sizeof rights};
        long got = CALL(recvmsg, channel, &message, CLOEXEC_RIGHTS);
        if (got == -EINTR)
            continue;
        if (need(&me, got) == 0) /* nobody wants a sandbox any more */
            CALL(exit_group, 0);
        keep_rights(&rights, message.control_length);
        to += got;
        length -= (size_t)got;
    }
}

struct frame {
    char *at, *end;
};

static struct frame next_frame(void)
{
    uint32_t length;
    receive((char *)&length, sizeof length);
    used = (used + 15) & ~(size_t)15;
    if (length > sizeof memory - used)
        me.give_up(&me, E2BIG);
    char *at = memory + used;
    rehearse_memory(memory, used + length, sizeof memory);
    receive(at, length);
    used += length;
    return (struct frame){at, at + length};
}

/* The first process has executed the agent, or is dead. */
static _Noreturn void wait_and_report(void)
{
    int alive;
    struct text line = {.length = 0};
    while ((alive = __atomic_load_n(&shared.alive, __ATOMIC_SEQ_CST)))
        futex_wait(&shared.alive, alive);
    if (shared.error)
        report_failure(&shared.inside, shared.error);
    add(&line, shared.executing ? "ok" : "killed ");
    if (!shared.executing)
        add(&line, shared.inside.step);
    end(&line, shared.executing ? 0 : 125);
}

_Noreturn void run(int count, char **arguments)
{
    (void)count;
    (void)arguments;
    CALL(umask, 0); /* the modes of the plan are what they say */
    shared.listener = shared.agent = shared.guard = -1;
    struct frame host_early = next_frame(), inside_early = next_frame();
    shared.inside = (struct worker){.at = inside_early.at, .end = inside_early.end, .step = "start", .detail = ""};
    shared.inside.give_up = launcher_gives_up;
    host_part(host_early.at, host_early.end);
    struct frame host = next_frame(), inside = next_frame(), filter = next_frame();
    shared.words = inside.at;
    shared.words_end = inside.end;
    shared.filter = filter.at;
    shared.filter_bytes = (size_t)(filter.end - filter.at);
    if (shared.listener < 0 || shared.agent < 0)
        me.give_up(&me, EINVAL);
    host_part(host.at, host.end);
    if (!first_pid || !shared.told) /* it would wait for its ids for ever */
        me.give_up(&me, EINVAL);
    __atomic_store_n(&shared.host_done, 1, __ATOMIC_SEQ_CST);
    futex_wake(&shared.host_done);
    wait_and_report();
}
