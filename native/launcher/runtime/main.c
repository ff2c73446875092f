/*
 * atoll-mount: creates a sandbox's file tree and namespaces, then executes the OCI runtime. Inside the sandbox, it performs the
 * last step before the agent.
 *
 * `atoll-mount prepare LIST REPORT -- RUNTIME ARGS…` reads words from descriptor LIST and executes them in order. launcher_protocol.py
 * computes them from the plan; they are documented where they are executed, and most are those of atoll-native. A failure is written
 * to descriptor REPORT; all descriptors from LIST on are closed for the OCI runtime. The program starts as root of the host and works
 * in three phases:
 *
 *   1. The host phase (prepare.c), in a new, private mount namespace, so that the host never sees the mounts and all of them disappear
 *      with the last process in it, without any clean-up. Network, IPC and UTS namespaces are created here, too, so they belong to the
 *      host's user namespace: root inside the sandbox has no rights over them and cannot write to any file of /proc/sys. Everything
 *      that only the host's root may do happens here: id-mapped clones of the layers, a tmpfs with device nodes, sysfs. They are kept
 *      as descriptors.
 *   2. The sandbox phase (after the word `inside`), in a child in the sandbox's user namespace and a mount namespace owned by it. The
 *      overlay is mounted here, with the credentials of the sandbox's root, who has no rights outside. All paths inside the image are
 *      resolved here, with openat2 and RESOLVE_IN_ROOT, because the image is not trusted.
 *   3. The parent joins the finished mount namespace and executes the OCI runtime. Only the runtime sees the tree, at the stage
 *      directory.
 *
 * `atoll-mount within LIST FILTER PROGRAM [GUARD] -- ARGV…` runs as the sandbox's first program (within.c), from a descriptor. It covers
 * files that /proc should not show. The sandbox's root is a directory *below* the overlay's mount point, so neither the overlay nor its
 * options appear in any /proc/PID/mountinfo. This step enters that directory, drops the three capabilities that it needed for all
 * this, installs the filter of system calls, and executes the agent from descriptor PROGRAM. The sandbox cannot read the agent's file
 * (mode 0711, owner not mapped), so the kernel makes the process undumpable and bound to the host's user namespace: root inside can
 * neither trace it nor open its memory.
 *
 * `atoll-mount supervise FD KIND` decides about set-id bits for a sandbox that has a writable volume: see supervisor.c.
 *
 * Every failure is reported as one line, `failed ERRNO STEP DETAIL`, and the exit status 125; nothing is retried.
 */
#include "runtime.h"

static __attribute__((noreturn)) void give_up(struct worker *worker, long error)
{
    struct text line = {.length = 0};
    add_failure(&line, worker, error);
    add(&line, "\n");
    CALL(write, report_fd, line.bytes, line.length);
    leave(125);
}

struct worker me = {.step = "start", .detail = "", .alone = true, .give_up = give_up};
int report_fd = 2;

_Noreturn void leave(int status)
{
    for (;;)
        CALL(exit_group, status);
}

long fork_process(void)
{
    return CALL(clone, CHILD_SIGNAL, 0, 0, 0, 0);
}

/* Read FD to its end. */
static size_t read_all(int fd, char *to, size_t room)
{
    size_t length = 0;
    for (;;) {
        long got = need(&me, CALL(read, fd, to + length, room - length));
        length += (size_t)got;
        if (length == room)
            give_up(&me, E2BIG);
        if (got == 0)
            break;
    }
    CALL(close, fd);
    return length;
}

void load_words(int fd)
{
    static char words[MAX_LIST];
    me.step = "read";
    me.at = words;
    me.end = words + read_all(fd, words, sizeof words);
}

void install_filter_from(int fd, int guard)
{
    static char code[1 << 16] __attribute__((aligned(8)));
    me.step = "filter", me.detail = "";
    install_filter(&me, code, read_all(fd, code, sizeof code), guard);
}

static _Noreturn void explain(const char *usage)
{
    CALL(write, 2, usage, strlen(usage));
    leave(2);
}

static int descriptor(const char *word)
{
    unsigned long number;
    if (!parse_number(&word, 10, &number) || *word || number > 1 << 20)
        explain("atoll-mount: bad descriptor\n");
    return (int)number;
}

_Noreturn void run(int count, char **arguments)
{
    char **environment = arguments + count + 1, **rest = arguments + 2;
    const char *program = count > 1 ? arguments[1] : "";
    int words = 0; /* the number of words before the `--` */
    while (words < count - 2 && strcmp(rest[words], "--"))
        words++;
    bool has_command = words < count - 3;
    if (!strcmp(program, "prepare") && words == 2 && has_command) {
        report_fd = descriptor(rest[1]);
        prepare(descriptor(rest[0]), rest + 3, environment);
    }
    if (!strcmp(program, "within") && (words == 3 || words == 4) && has_command)
        within(descriptor(rest[0]), descriptor(rest[1]), descriptor(rest[2]), words == 4 ? descriptor(rest[3]) : -1,
               rest + words + 1, environment);
    if (!strcmp(program, "supervise") && count == 4)
        supervise(descriptor(rest[0]), !strcmp(rest[1], "virtual"));
    explain("usage: atoll-mount prepare LIST REPORT -- PROGRAM ARGUMENTS\n"
            "       atoll-mount within LIST FILTER PROGRAM [GUARD] -- ARGUMENTS\n"
            "       atoll-mount supervise CHANNEL namespaces|virtual\n");
}
