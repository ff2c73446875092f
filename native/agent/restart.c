/* Restarts: a process whose START has RESTART is started again when it ends, for as long as the agent lives.
 *
 * It happens in the sandbox, so it does not matter whether any program of the host watches. When the process itself has ended, what
 * it left running is killed, and then it is started with the same fields, under the same id and with the same kept output. It
 * waits before, longer each time that the process ended soon after its start. A kill on request ends it for good, and so does a
 * program that cannot be executed at the first start.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

enum { FIRST_WAIT_MS = 200, MOST_WAIT_MS = 30000, STEADY_MS = 10000 /* after this time, a process did not end soon */ };

static void restart_fire(struct timer *timer);

int restart_prepare(struct process *process, struct fields fields)
{
    struct restart *restart = &process->restart;
    uint64_t policy = fields_number_or(fields, TAG_RESTART, RESTART_NEVER), deadline_ms = fields_number_or(fields, TAG_DEADLINE_MS, 0);
    if (policy == RESTART_NEVER)
        return 0;
    if (policy > RESTART_ON_FAILURE || deadline_ms || process->flags & (START_STDIN | START_PTY | START_STATUS | START_FORGET))
        return errno = EINVAL, -1; /* whoever gives it input or waits for its end would not know of the next one */
    restart->bytes = malloc(fields.length + 1);
    if (!restart->bytes)
        return -1;
    memcpy(restart->bytes, fields.bytes, fields.length);
    restart->length = fields.length;
    restart->policy = (unsigned)policy;
    restart->timer.fire = restart_fire;
    return 0;
}

bool restart_follows(const struct process *process)
{
    const struct restart *restart = &process->restart;
    if (restart->policy == RESTART_NEVER || (process->stage != STAGE_NONE && !restart->count))
        return false;
    if (process->cause && process->cause != CAUSE_LOST)
        return false;
    return restart->policy == RESTART_ALWAYS || process->status != 0 || process->stage != STAGE_NONE;
}

static unsigned wait_ms(const struct restart *restart)
{
    unsigned ms = FIRST_WAIT_MS;
    for (unsigned i = 1; i < restart->failures && ms < MOST_WAIT_MS; i++)
        ms *= 2;
    return ms < MOST_WAIT_MS ? ms : MOST_WAIT_MS;
}

static void say(struct process *process, const char *text)
{
    channel_say(&process->channels[process->flags & START_MERGE ? 0 : 1], text);
    if (process->stream)
        stream_wake(process->stream);
}

static void say_why(struct process *process)
{
    char text[160], how[64];
    int status = process->status;
    if (process->stage != STAGE_NONE)
        snprintf(how, sizeof how, "could not be started (%s)", strerror(process->error));
    else if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "was ended by signal %d", WTERMSIG(status));
    else
        snprintf(how, sizeof how, "ended with exit code %d", WEXITSTATUS(status));
    snprintf(text, sizeof text, "atoll: the command %s; it starts again in %.1f s\n", how, wait_ms(&process->restart) / 1000.0);
    say(process, text);
}

void restart_begin(struct process *process)
{
    struct restart *restart = &process->restart;
    restart->pending = true;
    restart->last_cause = process->cause ? process->cause : WIFSIGNALED(process->status) ? CAUSE_SIGNAL : CAUSE_EXIT;
    restart->last_status = (unsigned)process->status;
    process->cause = 0;
    restart->failures = process->ended_ns - process->started_ns < (uint64_t)STEADY_MS * MS ? restart->failures + 1 : 1;
    start_kill(process, 0); /* the tree is gone later, unless it is gone already: see process_gone */
}

static void set_timer(struct process *process)
{
    struct restart *restart = &process->restart;
    restart->waiting = true;
    timer_set(&restart->timer, now_ns() + (uint64_t)wait_ms(restart) * MS);
}

void restart_later(struct process *process)
{
    for (int i = 0; i < CHANNELS; i++) {
        channel_drain(&process->channels[i]);
        source_close(&process->channels[i].source);
    }
    say_why(process);
    process->pid = 0;
    set_timer(process);
}

static void start_again(struct process *process)
{
    struct restart *restart = &process->restart;
    restart->waiting = restart->pending = false;
    restart->count++;
    process->supervisor = process->pid = 0;
    process->stage = STAGE_NONE;
    process->error = process->status = 0;
    process->cpu_ns = process->max_rss_bytes = process->kill_ns = 0;
    process->ended = process->lost = process->exited = process->gone = process->killing = process->evades = false;
    memset(&process->launch, 0, sizeof process->launch);
    if (process_begin(process, (struct fields){restart->bytes, restart->length}) == 0)
        return;
    /* There are too many processes or there is no memory now, so wait as after any other failure. */
    char text[160];
    snprintf(text, sizeof text, "atoll: the command cannot be started: %s\n", strerror(errno));
    launch_release(&process->launch);
    for (int i = 0; i < CHANNELS; i++)
        source_close(&process->channels[i].source);
    process->exited = process->gone = restart->pending = true;
    process->ended_ns = process->started_ns = now_ns();
    restart->failures++;
    say(process, text);
    set_timer(process);
}

static void restart_fire(struct timer *timer)
{
    start_again((struct process *)((char *)timer - offsetof(struct process, restart.timer)));
}

bool restart_cancel(struct process *process)
{
    struct restart *restart = &process->restart;
    restart->policy = RESTART_NEVER;
    if (!restart->pending)
        return false;
    restart->pending = false;
    process->cause = CAUSE_KILLED;
    if (!restart->waiting)
        return false; /* what it left running is being killed */
    restart->waiting = false;
    timer_set(&restart->timer, 0);
    process->status = (int)restart->last_status;
    check_complete(process);
    return true;
}

void restart_release(struct process *process)
{
    timer_set(&process->restart.timer, 0);
    free(process->restart.bytes);
}
