/* Deadlines, signals and kills: everything that makes a process end early. */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

static void kill_round(struct process *process)
{
    if (process->gone || process->lost)
        return;
    signal_process(process->supervisor, SIGCONT);
    bool urgent = process->evades || now_ns() - process->kill_ns > URGENT_NS;
    struct outcome outcome = kill_below(process->supervisor, 0, NULL, urgent);
    process->evades |= outcome.evaded;
    uint64_t now = now_ns(), since = now - process->kill_ns;
    /* The children of a killed supervisor become children of the agent, which then reaps them itself. If very many processes
     * compete for the CPUs, the supervisor hardly gets to run. See sweep in reaper.c. */
    if (since > PATIENCE_NS || (outcome.evaded && since > 100 * MS))
        signal_process(process->supervisor, SIGKILL);
    if (since > GIVE_UP_NS)
        check_complete(process);
    timer_set(&process->kill_again, outcome.evaded ? now : now + (since < 50 * MS ? 1 : since < 1000 * MS ? 5 : 50) * MS);
}

void kill_again_fire(struct timer *timer) { kill_round(OWNER(timer, kill_again)); }

void start_kill(struct process *process, unsigned cause)
{
    if (process->gone || process->killing)
        return;
    process->killing = true;
    if (!process->lost)
        process->kill_ns = now_ns();
    if (!process->cause)
        process->cause = cause;
    kill_round(process);
}

/* Return the pid of the process itself, waiting briefly if its supervisor has not stored it yet. */
static pid_t own_pid(struct process *process)
{
    for (uint64_t until = now_ns() + 50 * MS; !process->pid && !process->ended && now_ns() < until;)
        sched_yield();
    return process->pid;
}

void deadline_fire(struct timer *timer)
{
    struct process *process = OWNER(timer, deadline);
    pid_t pid = own_pid(process);
    if (process->ended)
        return;
    if (!process->grace_ns || pid <= 0) {
        start_kill(process, CAUSE_TIMEOUT);
        return;
    }
    process->cause = CAUSE_TIMEOUT;
    signal_group(pid, SIGTERM);
    signal_group(pid, SIGCONT);
    timer_set(timer, now_ns() + process->grace_ns);
    process->grace_ns = 0;
}

int send_signal(struct process *process, uint64_t number, bool spare)
{
    if (number > 64)
        return EINVAL;
    if (number == SIGKILL && !spare) {
        if (restart_cancel(process))
            return 0;
        if (process->gone)
            return ESRCH;
        start_kill(process, CAUSE_KILLED);
        return 0;
    }
    pid_t pid = own_pid(process);
    if (process->gone || process->lost || pid <= 0)
        return ESRCH;
    if (spare) {
        kill_below(process->supervisor, pid, NULL, false);
        return 0;
    }
    return process->ended || signal_group(pid, (int)number) < 0 ? ESRCH : 0;
}

static void killer_closed(struct stream *stream)
{
    struct process *process = stream->owner;
    for (unsigned i = 0; i < process->killer_count; i++)
        if (process->killers[i] == stream)
            process->killers[i] = process->killers[--process->killer_count];
}

static const struct stream_ops killer_ops = {.closed = killer_closed};

void process_kill(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    uint64_t number = fields_number_or(fields, TAG_SIGNAL, SIGKILL);
    bool spare = fields_number_or(fields, TAG_FLAGS, 0) & 1;
    if (!process) {
        stream_fail(stream, ENOENT, "no such process");
        return;
    }
    bool waits = number == SIGKILL && !spare;
    if (waits && process->killer_count == sizeof process->killers / sizeof *process->killers) {
        stream_fail(stream, EAGAIN, "it is being killed");
        return;
    }
    int error = send_signal(process, number, spare);
    if (error) {
        stream_fail(stream, error, NULL);
    } else if (!waits || process->gone) {
        stream_finish(stream, NULL);
    } else {
        stream_serve(stream, &killer_ops, process);
        process->killers[process->killer_count++] = stream;
    }
}
