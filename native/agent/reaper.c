/* Waiting for processes that have ended, and killing those that have lost their supervisor. */
#define _GNU_SOURCE
#include "process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_REAPED = 256 /* in one turn */ };

static struct source notices, children;

static bool is_supervisor(pid_t pid)
{
    for (struct process *process = processes; process; process = process->next)
        if (process->supervisor == pid && !process->gone && !process->lost)
            return true;
    return false;
}

static bool reap(void);
static void sweep(struct timer *timer);
static struct timer sweeping = {.fire = sweep};

/* Kill all children of the agent that are not supervisors: they come from a supervisor that was killed. Until they are gone, the
 * process to which they belonged has not ended. */
static void sweep(struct timer *timer)
{
    static bool urgent;
    static uint64_t since_ns; /* the last time when there were none */
    reap(); /* reap first, so that the children of a supervisor that was killed are found below */
    struct outcome outcome = kill_below(getpid(), 0, is_supervisor, urgent);
    uint64_t now = now_ns();
    if (!outcome.present || !since_ns)
        since_ns = now;
    urgent = outcome.evaded || (outcome.present && now - since_ns > URGENT_NS);
    for (struct process *process = processes, *next; process; process = next) {
        next = process->next;
        if (!process->lost || process->gone)
            continue;
        if (!outcome.present || now - process->kill_ns >= GIVE_UP_NS)
            process_gone(process);
    }
    if (outcome.present)
        timer_set(timer, outcome.evaded ? now : now + (now - since_ns < PATIENCE_NS ? 1 : 100) * MS);
    else
        calm_down();
}

static void supervisor_ended(struct process *process, bool killed)
{
    if (!process->exited)
        notices_ready(&notices, 0); /* a supervisor sends its notice before it ends */
    if (!killed) {
        process_gone(process);
        return;
    }
    process->lost = true;
    if (!process->killing)
        process->kill_ns = now_ns();
}

/* Wait for all children that have ended. Returns true if some came from a supervisor that was killed, or may come now. */
static bool reap(void)
{
    bool strays = false;
    int status;
    pid_t pid;
    int count = 0;
    while (count++ < MOST_REAPED && (pid = waitpid(-1, &status, WNOHANG | WUNTRACED | __WALL)) > 0) {
        struct process *process = processes;
        if (WIFSTOPPED(status)) {
            signal_process(pid, SIGCONT); /* a stopped supervisor would not see its children end */
            continue;
        }
        while (process && (process->supervisor != pid || process->gone || process->lost))
            process = process->next;
        strays |= !process || WIFSIGNALED(status);
        if (process)
            supervisor_ended(process, WIFSIGNALED(status));
    }
    if (count > MOST_REAPED) /* killing is more urgent than reaping, so continue later */
        timer_set(&sweeping, now_ns());
    return strays;
}

static void children_ready(struct source *source, uint32_t events)
{
    struct signalfd_siginfo info;
    (void)events;
    if (read(source->fd, &info, sizeof info) >= 0 && reap())
        sweep(&sweeping);
}

void reaper_init(void)
{
    int fds[2];
    sigset_t mask;
    if (pipe2(fds, O_CLOEXEC) < 0 || dup3(fds[1], NOTICE_FD, O_CLOEXEC) < 0)
        _exit(73);
    close(fds[1]);
    fcntl(fds[0], F_SETFL, O_NONBLOCK); /* only the reading end: a supervisor may block, the agent may not */
    notices = (struct source){.fd = fds[0], .ready = notices_ready};
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    children = (struct source){.fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), .ready = children_ready};
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (source_watch(&notices, EPOLLIN) < 0 || source_watch(&children, EPOLLIN) < 0)
        _exit(74);
}
