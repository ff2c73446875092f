/*
 * atoll-native: creates a sandbox with the agent as its first process, and exits.
 *
 * Two processes share their memory. The launcher (main.c, host.c) is root of the host; it never resolves a path of the image. The
 * first process (first.c) is root of the sandbox's user namespace, who has no rights outside; it assembles the sandbox and finally
 * executes the agent. They work concurrently: the launcher creates mounts that need the host's rights as descriptors, and the first
 * process takes each when it needs it. They share memory and descriptors (CLONE_VM, CLONE_FILES), so nothing is copied and the first
 * process can report why it failed; the kernel ends both kinds of sharing at execve.
 *
 * Descriptor 3 is a stream socket, over which frames arrive: a length, then that many bytes of words. The meaning of each word is
 * documented where it is executed. launcher_protocol.py computes the words from the plan; the launcher makes no decisions.
 *
 *   1. host, early      namespaces of the host, the stage, the first process, sysfs
 *   2. inside, early    /proc and /sys, covered; then the host's mounts are detached
 *   3. host             the control group, the id maps, id-mapped clones of the layers, devices. Two descriptors come with it: the
 *                       listening socket and the agent's file. A sandbox with a writable volume gets a third one, the socket of
 *                       the supervisor that decides about set-id bits (../runtime/supervisor.c)
 *   4. inside           overlay, mounts, root, limits, arguments
 *   5. the seccomp program
 *
 * Frames 1 and 2 are the same for all sandboxes, so a launcher can be kept waiting after it has executed them. If the socket is closed
 * before all frames have arrived, the launcher exits and leaves nothing behind. It answers `first PID` as soon as there is a first
 * process, and then one more line: `ok`, `failed ERRNO STEP DETAIL` or `killed STEP`. It is not necessary to wait for `ok`, because
 * the agent answers by itself.
 *
 * Namespaces. The launcher calls unshare(NEWNET|NEWIPC|NEWUTS): these belong to the host, so root inside has no rights over them.
 * clone3(NEWUSER|NEWPID|NEWNS): these belong to the sandbox, which needs them to mount an overlay and /proc. The first process calls
 * unshare(NEWCGROUP) once it is in its control group, which then is the top of the hierarchy that it sees.
 *
 * Ordinary users. All of this works without rights on the host: `enter` joins a user namespace in which the user has them, made once
 * for all launchers of the user (native/ordinary.py), and a mount namespace that belongs to it. The steps are those of root of the
 * host, with these differences: layers keep their ids on disk; devices are the host's own, attached one by one; there is no control
 * group, so the first process is found by its process id, which is recorded before the process is told to continue.
 *
 * Mounts. tmpfs (the stage): mounts need a place before the root exists; its empty file and directory cover files with which the
 * kernel describes the machine. proc: of the new PID namespace. sysfs, mqueue: of namespaces that the host owns, so the launcher
 * mounts them. Clones of layers, /usr and volumes, with ids mapped: no file is copied or chowned. overlay: in the sandbox's own mount
 * namespace, so it disappears with it; `volatile`, so that this requires no sync. tmpfs with device nodes: only the host's root can
 * create nodes, and only the listed ones exist. devpts, tmpfs on /dev/shm: the sandbox's own. After pivot_root to the stage, the
 * host's mounts are detached, so a waiting launcher keeps none busy. At the end the overlay is moved over the stage, and a chroot to
 * the directory below its top keeps it out of every mount table. A second pivot_root would be slow, because it examines every process
 * of the machine, and is unnecessary: below the overlay there are only its own parts.
 *
 * Linux capabilities. The first process has all those of its user namespace until it drops all but those of the plan from every set,
 * including the bounding set. Then it sets no_new_privs and installs the filter; after that it only calls execveat.
 *
 * Landlock is not used. It restricts which files of a process's own tree it may use, but files outside of the sandbox's tree are not in
 * its mount namespace anyway, and root inside must have every right to those in it. Landlock also forbids changing mounts, but three
 * barriers do that already (no CAP_SYS_ADMIN in any set, no new user namespace, the filter), and it would slow down every open().
 * The launcher itself cannot use it: a process under Landlock may not mount.
 *
 * Ownership. Until the first process joins its control group, it belongs to the launcher and dies with it (PR_SET_PDEATHSIG, and a
 * pidfd for the case that the launcher died before that call). From then on it is found by its control group. A group that was removed
 * meanwhile cannot be joined. So at any moment, whatever was killed, there is either a sandbox in its control group or nothing.
 */
#include <linux/uio.h>

#include "sandbox.h"

struct shared shared;
static int channel = 3;
static char memory[MAX_LIST] __attribute__((aligned(16)));
static size_t used;

/* -- the report: lines, of which the last is `ok`, `failed` or `killed` -- */

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
        /* If the first process has failed, too, its failure is the cause of this one. */
        if (shared.error)
            report_failure(&shared.inside, shared.error);
    }
    report_failure(worker, error);
}

static struct worker me = {.step = "read", .detail = "", .give_up = launcher_gives_up};

/* -- the words: frames of a length and that many bytes; descriptors come with the first byte of a frame -- */

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
        if (need(&me, got) == 0) /* the socket was closed: no sandbox is needed */
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

/* Wait until the first process has executed the agent or died, and report that. */
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
    CALL(umask, 0); /* so that files get exactly the modes of the plan */
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
    if (!first_pid || !shared.told) /* otherwise it would wait for its ids forever */
        me.give_up(&me, EINVAL);
    __atomic_store_n(&shared.host_done, 1, __ATOMIC_SEQ_CST);
    futex_wake(&shared.host_done);
    wait_and_report();
}
