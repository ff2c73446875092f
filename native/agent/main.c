/* atoll-agent: the program that runs inside every sandbox and does what the host asks.
 *
 * The agent is on the untrusted side. It holds no secret of the host, and it can do nothing that code in the sandbox could not do
 * by itself; the host does not trust anything that it sends. It exists so that commands, files and ports work in the same way with
 * every engine, over one byte stream (docs/protocol.md).
 *
 * One process, one epoll loop, no threads. loop.c is the loop; connection.c reads and writes frames. Every operation is a stream
 * (stream.c) with a few callbacks: process.c and the files that it names for commands, the files file*.c, tree.c, put.c and watch.c for
 * files, port.c for ports. If the engine can arrange it, the agent is PID 1 of the sandbox, and then it also reaps orphans.
 *
 *   atoll-agent --listen-fd N    accept on an inherited, listening socket, which nothing inside can replace
 *   atoll-agent --listen-path P  make and accept on a unix socket
 *   atoll-agent --stdio          a connection over stdin and stdout until the end of the input, which does not end the agent. Where
 *                                stdin is a fifo the host may open both again later, for the next connection
 *     --work-dir DIR             where relative paths and commands start
 *     --rlimit-nofile N          a cap on open files for everything inside
 *     --lifetime-ms N            end so long after the start, with the exit status 75. As PID 1 it takes everything inside with it
 *   atoll-agent connect P        connect stdin and stdout to the Unix socket P (a bridge for engines that can only run programs)
 *   sudo …                       what the program does under this name: see sudo_client.c
 *   atoll-agent --as U:G -- CMD  on the host: change from root to uid U and gid G, in a new session, then run CMD
 */
#define _GNU_SOURCE
#include "agent.h"
#include "sudo.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

struct agent agent;

void die(const char *what)
{
    fprintf(stderr, "atoll-agent: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t own_rss(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    unsigned long size = 0, resident = 0, shared = 0;
    if (file && fscanf(file, "%lu %lu %lu", &size, &resident, &shared) != 3)
        resident = shared = 0;
    if (file)
        fclose(file);
    return (uint64_t)(resident - shared) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t processes_seen(void)
{
    uint64_t count = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));)
        count += entry->d_name[0] >= '1' && entry->d_name[0] <= '9';
    if (proc)
        closedir(proc);
    return count;
}

static void answer_hello(struct stream *stream)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_VERSION, PROTOCOL_VERSION);
    add_bytes(&fields, TAG_INSTANCE, agent.instance, sizeof agent.instance);
    add_number(&fields, TAG_PID, (uint64_t)getpid());
    add_number(&fields, TAG_UPTIME_NS, now_ns() - agent.started_ns);
    stream_finish(stream, &fields);
}

static void answer_stats(struct stream *stream)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_RSS_BYTES, own_rss());
    add_number(&fields, TAG_PROCESSES, processes_seen());
    add_number(&fields, TAG_STREAMS, streams_count());
    add_number(&fields, TAG_CONNECTIONS, connections_count());
    add_number(&fields, TAG_OUTPUT_BYTES, processes_output_bytes());
    add_number(&fields, TAG_UPTIME_NS, now_ns() - agent.started_ns);
    stream_finish(stream, &fields);
}

void operation_open(struct stream *stream, unsigned operation, struct fields fields)
{
    switch (operation) {
    case OP_HELLO: answer_hello(stream); break;
    case OP_STATS: answer_stats(stream); break;
    case OP_START: process_start(stream, fields); break;
    case OP_ATTACH: process_attach(stream, fields); break;
    case OP_PROCESSES: process_list(stream); break;
    case OP_KILL: process_kill(stream, fields); break;
    case OP_RELEASE: process_release(stream, fields); break;
    case OP_RESTARTS: process_restarts(stream); break;
    case OP_SUDO: sudo_allow(stream, fields); break;
    case OP_STAT:
    case OP_MKDIR:
    case OP_RENAME:
    case OP_CHMOD:
    case OP_CHOWN:
    case OP_SYMLINK: file_simple(stream, operation, fields); break;
    case OP_REMOVE: file_remove(stream, fields); break;
    case OP_READ: file_read(stream, fields); break;
    case OP_WRITE: file_write(stream, fields); break;
    case OP_LIST:
    case OP_WALK:
    case OP_GET_TREE: tree_walk(stream, operation, fields); break;
    case OP_PUT_TREE: tree_put(stream, fields); break;
    case OP_WATCH: watch_open(stream, fields); break;
    case OP_CONNECT: port_open(stream, fields); break;
    default: stream_fail(stream, ENOSYS, "unknown operation");
    }
}

/* --- the other modes -------------------------------------------------------------------------------------------------------- */

/* Run a program as another user or the same one, separated from the session it was started in. For `--own-files` see fresh.c. */
static int start_fresh(int argc, char **argv)
{
    unsigned uid = 0, gid = 0;
    char rest;
    bool same = argc > 2 && strcmp(argv[2], "same") == 0, own = argc > 4 && strcmp(argv[3], "--own-files") == 0;
    int command = own ? 6 : 4;
    if (argc <= command || strcmp(argv[command - 1], "--")
        || (!same && (sscanf(argv[2], "%u:%u%c", &uid, &gid, &rest) != 2 || !uid || !gid
            || uid == (uid_t)-1 || gid == (gid_t)-1))) { /* -1 means: do not change the id */
        fprintf(stderr, "usage: atoll-agent --as UID:GID|same [--own-files DIRECTORY] -- COMMAND...\n");
        return 2;
    }
    for (int signal = 1; signal < 32; signal++)
        if (signal != SIGKILL && signal != SIGSTOP)
            sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    if (!same && (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0))
        die("cannot give up root");
    leave_session();
    if (own)
        own_files(argv[4]);
    execvp(argv[command], argv + command);
    die(argv[command]);
    return 127;
}

/* Returns 1: copied; 0: end of input; -1: cannot be written. The descriptors may be non-blocking, so wait with poll if necessary. */
static int copy_some(int from, int to)
{
    char buffer[65536];
    ssize_t length = read(from, buffer, sizeof buffer);
    if (length < 0 && errno == EAGAIN)
        poll(&(struct pollfd){.fd = from, .events = POLLIN}, 1, -1);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    for (ssize_t done = 0; done < length;) {
        ssize_t part = write(to, buffer + done, (size_t)(length - done));
        if (part < 0 && errno == EAGAIN)
            poll(&(struct pollfd){.fd = to, .events = POLLOUT}, 1, -1);
        else if (part == 0 || (part < 0 && errno != EINTR))
            return -1;
        else if (part > 0)
            done += part;
    }
    return length > 0;
}

/* Ends when the agent closes its side. The end of the input is passed on, and further output of the agent is still copied. */
static int bridge(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (strlen(path) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, path);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die(path);
    /* Each direction has its own process, so that a blocked write in one does not stop reading in the other. */
    pid_t us = getpid(), child = fork();
    if (child < 0)
        die("fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != us)
            return 1;
        while (copy_some(0, fd) > 0)
            ;
        shutdown(fd, SHUT_WR);
        return 0;
    }
    while (copy_some(fd, 1) > 0)
        ;
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (strlen(path) >= sizeof address.sun_path)
        die("socket path");
    strcpy(address.sun_path, path);
    unlink(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 128) < 0)
        die(path);
    chmod(path, 0600);
    return fd;
}

/* --- becoming the agent --------------------------------------------------------------------------------------------------------- */

struct options {
    int listen_fd;
    const char *listen_path, *work_dir;
    bool stdio, gvisor;
    unsigned long open_files, lifetime_ms;
};

static struct options parse_options(int argc, char **argv)
{
    struct options options = {.listen_fd = -1, .work_dir = "/"};
    for (int i = 1; i < argc; i++) {
        bool last = i + 1 == argc;
        if (strcmp(argv[i], "--stdio") == 0)
            options.stdio = true;
        else if (strcmp(argv[i], "--gvisor") == 0)
            options.gvisor = true;
        else if (strcmp(argv[i], "--listen-fd") == 0 && !last)
            options.listen_fd = atoi(argv[++i]);
        else if (strcmp(argv[i], "--listen-path") == 0 && !last)
            options.listen_path = argv[++i];
        else if (strcmp(argv[i], "--work-dir") == 0 && !last)
            options.work_dir = argv[++i];
        else if (strcmp(argv[i], "--rlimit-nofile") == 0 && !last)
            options.open_files = strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--lifetime-ms") == 0 && !last)
            options.lifetime_ms = strtoul(argv[++i], NULL, 10);
        else {
            fprintf(stderr, "atoll-agent: bad argument: %s\n", argv[i]);
            exit(2);
        }
    }
    if (options.listen_fd < 0 && !options.listen_path && !options.stdio) {
        fprintf(stderr, "usage: atoll-agent (--listen-fd N | --listen-path PATH | --stdio) [--work-dir DIR]\n");
        exit(2);
    }
    return options;
}

/* Descriptors named in the options get fixed numbers; all other inherited ones are closed. */
enum { LISTEN_FD = FIRST_FREE_FD, INPUT_FD, OUTPUT_FD };

static void close_from(unsigned first, unsigned last)
{
    if (syscall(SYS_close_range, first, last, 0) == 0)
        return;
    for (unsigned fd = first; fd <= last && fd < 65536; fd++)
        close((int)fd);
}

static void claim(int fd, int number)
{
    if (fd == number ? fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 : dup3(fd, number, O_CLOEXEC) < 0)
        die("descriptors");
}

static void sort_descriptors(const struct options *options)
{
    if (options->listen_fd >= 0)
        claim(options->listen_fd, LISTEN_FD);
    else
        close(LISTEN_FD);
    close_from(OUTPUT_FD + 1, INT_MAX); /* not ~0: see close_between in supervise.c */
    close_from(3, LISTEN_FD - 1);
    close_from(INPUT_FD, OUTPUT_FD);
    if (options->stdio) {
        claim(0, INPUT_FD);
        claim(1, OUTPUT_FD);
        close(0);
        close(1);
    }
    int low;
    do
        low = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (low >= 0 && low < FIRST_FREE_FD);
    if (low < 0)
        die("/dev/null");
    close(low);
}

/* Set up the state that commands inherit: no ignored signal, no raised limit (see launch.c). */
static void settle_signals(void)
{
    /* Use the system call: the C library hides its own signals, 32 and 33, and its posix_spawn leaves 32 ignored. */
    struct {
        void (*handler)(int);
        unsigned long flags, restorer, mask;
    } now, standard = {.handler = SIG_DFL};
    sigset_t mask;
    for (int number = 1; number < NSIG; number++)
        if (syscall(SYS_rt_sigaction, number, NULL, &now, 8) == 0 && now.handler == SIG_IGN)
            syscall(SYS_rt_sigaction, number, &standard, NULL, 8);
    sigemptyset(&mask);
    sigaddset(&mask, SIGPIPE); /* blocked instead of ignored, which would be inherited */
    sigprocmask(SIG_SETMASK, &mask, NULL);
}

static void settle_limits(const struct options *options)
{
    if (options->open_files && setrlimit(RLIMIT_NOFILE, &(struct rlimit){options->open_files, options->open_files}) < 0)
        die("--rlimit-nofile");
    if (getrlimit(RLIMIT_NOFILE, &agent.open_files) == 0 && agent.open_files.rlim_cur < agent.open_files.rlim_max) {
        struct rlimit raised = {agent.open_files.rlim_max, agent.open_files.rlim_max};
        agent.raised_open_files = setrlimit(RLIMIT_NOFILE, &raised) == 0;
    }
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 64 * 1024); /* large buffers go back to the system when they are freed */
    mallopt(M_TRIM_THRESHOLD, 64 * 1024);
#endif
}

static void settle_in(const struct options *options)
{
    if (getrandom(agent.instance, sizeof agent.instance, 0) != sizeof agent.instance)
        die("random numbers");
    agent.started_ns = now_ns();
    umask(022);
    prctl(PR_SET_DUMPABLE, 0); /* commands of the same user may not trace the agent or read its memory */
    settle_signals();
    settle_limits(options);
    if (strlen(options->work_dir) >= sizeof agent.work_dir || options->work_dir[0] != '/' || chdir(options->work_dir) < 0)
        die(options->work_dir);
    strcpy(agent.work_dir, options->work_dir);
}

enum { LIFETIME_OVER = 75 };

static void end_life(struct timer *timer)
{
    (void)timer;
    _exit(LIFETIME_OVER);
}

/* End the agent after its lifetime. This uses a timer of the loop, because processes inside could send a signal. */
static void limit_life(unsigned long lifetime_ms)
{
    static struct timer lifetime = {.fire = end_life};
    if (lifetime_ms)
        timer_set(&lifetime, agent.started_ns + lifetime_ms * MS);
}

int main(int argc, char **argv)
{
    const char *name = argc ? strrchr(argv[0], '/') : NULL;
    if (argc && strcmp(name ? name + 1 : argv[0], "sudo") == 0)
        return sudo_client(argc, argv);
    if (argc > 1 && strcmp(argv[1], "--as") == 0)
        return start_fresh(argc, argv);
    if (argc == 3 && strcmp(argv[1], "connect") == 0)
        return bridge(argv[2]);
    struct options options = parse_options(argc, argv);
    settle_in(&options);
    sort_descriptors(&options);
    loop_init();
    limit_life(options.lifetime_ms);
    reaper_init();
    if (options.gvisor)
        gvisor_init();
    if (options.stdio)
        connection_over(INPUT_FD, OUTPUT_FD);
    if (options.listen_path)
        connections_listen(listen_at(options.listen_path));
    else if (options.listen_fd >= 0)
        connections_listen(LISTEN_FD);
    loop_run();
}
