/* Killing all descendants of a process, even if they try to evade it.
 *
 * A process that has SIGKILL pending can no longer fork. So in a tree that does not change, no process can be missed: each one that
 * is found is killed first, with its group, and its children are listed afterwards. A process that forks and exits as fast as it can
 * moves from below its parent to below the root just after the root was checked. Only speed helps against that. So a hunt reads the
 * kernel's list of the root's children repeatedly without pause, and handles each process only once, because there may be thousands
 * of dead ones that were not waited for yet. Only if there is no new one does it look below those that it has killed. That is not
 * necessary, because they will die and their children will move below the root, but it is faster for a deep tree.
 *
 * Kernels may be built without these lists; then all of /proc is read, which takes milliseconds instead of microseconds.
 *
 * The agent sends signals only through the three functions below.
 */
#define _GNU_SOURCE
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FOUND = 1 << 20, URGENT_PASSES = 20 };
#define BURST_NS 10000000u /* CPU time until others get their turn. If many processes compete, one pass may last far longer */

/* kill(2) interprets 0, -1 and other negative numbers as groups of processes, including the agent's own group and all processes.
 * A wrong number must never address one of these, nor the agent itself, nor the init of a machine on which it runs. */
int signal_process(pid_t pid, int number)
{
    if (pid <= 1 || pid == getpid())
        return errno = ESRCH, -1;
    return kill(pid, number);
}

int signal_group(pid_t group, int number)
{
    if (group <= 1 || group == getpgrp() || group == getpid())
        return errno = ESRCH, -1;
    return kill(-group, number);
}

/* Signal everything but the agent. Only the init of a sandbox may do so, because it sees no process outside. */
static bool signal_everything(int number) { return getpid() == 1 && kill(-1, number) == 0; }

static uint64_t own_time_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A set of process ids: a hash table with open addressing, in which 0 is a free slot. */
struct set {
    pid_t *slots;
    size_t count, capacity;
};

static bool set_insert(pid_t *slots, size_t capacity, pid_t pid)
{
    size_t at = (size_t)pid * 2654435761u % capacity;
    while (slots[at] && slots[at] != pid)
        at = (at + 1) % capacity;
    bool is_new = !slots[at];
    slots[at] = pid;
    return is_new;
}

/* Returns false if the set had it already. Without memory every process counts as new, which only makes the hunt slower. */
static bool set_add(struct set *set, pid_t pid)
{
    if (set->count * 2 >= set->capacity) {
        size_t capacity = set->capacity ? set->capacity * 4 : 256;
        pid_t *larger = calloc(capacity, sizeof *larger);
        if (!larger)
            return true;
        for (size_t i = 0; i < set->capacity; i++)
            if (set->slots[i])
                set_insert(larger, capacity, set->slots[i]);
        free(set->slots);
        set->slots = larger;
        set->capacity = capacity;
    }
    bool is_new = set_insert(set->slots, set->capacity, pid);
    set->count += is_new;
    return is_new;
}

static bool set_has(const struct set *set, pid_t pid)
{
    if (!set->capacity)
        return false;
    size_t at = (size_t)pid * 2654435761u % set->capacity;
    while (set->slots[at] && set->slots[at] != pid)
        at = (at + 1) % set->capacity;
    return set->slots[at] == pid && pid;
}

struct hunt {
    pid_t root, spare;
    bool (*passed_over)(pid_t pid);
    int root_list;   /* the kernel's list of the root's children, or -1 */
    struct set met;  /* the processes met, and killed */
    pid_t *queue;    /* processes whose children are not known yet */
    size_t count, capacity;
    size_t present;  /* how many below the root this pass has met */
    size_t fresh;    /* how many of them for the first time */
};

static void enqueue(struct hunt *hunt, pid_t pid)
{
    if (hunt->count == hunt->capacity) {
        size_t capacity = hunt->capacity ? hunt->capacity * 2 : 64;
        pid_t *larger = capacity <= MOST_FOUND ? realloc(hunt->queue, capacity * sizeof *larger) : NULL;
        if (!larger)
            return; /* its children move below the root when it has died */
        hunt->queue = larger;
        hunt->capacity = capacity;
    }
    hunt->queue[hunt->count++] = pid;
}

static void meet(struct hunt *hunt, pid_t pid)
{
    if (pid <= 1 || pid == hunt->root || (hunt->passed_over && hunt->passed_over(pid)))
        return; /* do not look below it either */
    if (pid == hunt->spare) {
        enqueue(hunt, pid);
        return;
    }
    hunt->present++;
    if (!set_add(&hunt->met, pid))
        return; /* it is dying and can have no new children */
    hunt->fresh++;
    if (!hunt->spare) { /* otherwise it may be in the group of the spared process */
        pid_t group = getpgid(pid);
        if (group != hunt->root) /* a command that has just started is still in its supervisor's group */
            signal_group(group, SIGKILL);
    }
    signal_process(pid, SIGKILL);
    enqueue(hunt, pid);
}

/* --- through the lists of children -------------------------------------------------------------------------------------- */

static void meet_listed(struct hunt *hunt, int fd)
{
    char text[4096];
    pid_t pid = 0;
    for (ssize_t length; (length = read(fd, text, sizeof text)) > 0;) {
        for (ssize_t i = 0; i < length; i++) {
            if (text[i] >= '0' && text[i] <= '9') {
                pid = pid * 10 + (text[i] - '0');
            } else {
                if (pid)
                    meet(hunt, pid);
                pid = 0;
            }
        }
    }
}

static int open_list(pid_t pid, const char *thread)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%.10s/children", (int)pid, thread);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* Meet the children of all threads of a process. */
static void meet_children(struct hunt *hunt, pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *threads = opendir(path);
    for (struct dirent *entry; threads && (entry = readdir(threads));) {
        int fd = entry->d_name[0] == '.' ? -1 : open_list(pid, entry->d_name);
        if (fd < 0)
            continue;
        meet_listed(hunt, fd);
        close(fd);
    }
    if (threads)
        closedir(threads);
}

/* Only the list of the main thread is needed for the root: supervisors and the agent have one thread. */
static void pass_through_lists(struct hunt *hunt, uint64_t until)
{
    lseek(hunt->root_list, 0, SEEK_SET);
    meet_listed(hunt, hunt->root_list);
    if (hunt->fresh)
        return;
    for (size_t at = 0; at < hunt->count && own_time_ns() < until; at++)
        meet_children(hunt, hunt->queue[at]);
    hunt->count = 0;
}

/* --- through all of /proc --------------------------------------------------------------------------------------------------- */

struct task {
    pid_t pid, parent;
    bool seen;
};

static bool read_task(int proc_fd, const char *name, struct task *task)
{
    char path[32], text[512], state;
    snprintf(path, sizeof path, "%.10s/stat", name);
    int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = 0;
    /* The name in parentheses may contain any character, so the last parenthesis ends it. */
    const char *after = strrchr(text, ')');
    int parent;
    if (!after || sscanf(after + 1, " %c %d", &state, &parent) != 2)
        return false;
    *task = (struct task){.pid = (pid_t)atoi(name), .parent = parent};
    return true;
}

/* Return all visible processes, or NULL if there are none. The caller frees the result. */
static struct task *read_tasks(size_t *count)
{
    struct task *tasks = NULL;
    size_t capacity = 0;
    *count = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        if (*count == capacity) {
            capacity = capacity ? capacity * 2 : 256;
            struct task *larger = realloc(tasks, capacity * sizeof *tasks);
            if (!larger)
                break;
            tasks = larger;
        }
        if (read_task(dirfd(proc), entry->d_name, &tasks[*count]))
            ++*count;
    }
    if (proc)
        closedir(proc);
    return tasks;
}

static void pass_through_all(struct hunt *hunt)
{
    size_t count;
    struct task *tasks = read_tasks(&count);
    struct set below = {0};
    bool more = true;
    hunt->present += !tasks; /* if /proc cannot be read, assume that some are present */
    set_add(&below, hunt->root);
    while (more) {
        more = false;
        for (size_t i = 0; i < count; i++) {
            struct task *task = &tasks[i];
            if (task->seen || !set_has(&below, task->parent))
                continue;
            task->seen = more = true;
            if (hunt->passed_over && hunt->passed_over(task->pid))
                continue;
            set_add(&below, task->pid);
            meet(hunt, task->pid);
        }
    }
    free(below.slots);
    free(tasks);
}

/* --- both --------------------------------------------------------------------------------------------------------------------- */

/* A raised priority, above all ordinary processes or, if that is not allowed, above those in the same scheduling group. New
 * processes do not inherit the former; the latter is reset before each of them is started, and at the end. */
static bool raised;
static int usual_priority;

void calm_down(void)
{
    if (!raised)
        return;
    raised = false;
    sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
    setpriority(PRIO_PROCESS, 0, usual_priority);
}

static void hurry_up(void)
{
    if (raised)
        return;
    raised = true;
    usual_priority = getpriority(PRIO_PROCESS, 0);
    if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &(struct sched_param){.sched_priority = 1}) < 0)
        setpriority(PRIO_PROCESS, 0, -20);
}

struct outcome kill_below(pid_t root, pid_t spare, bool (*passed_over)(pid_t pid), bool urgent)
{
    char thread[16];
    struct outcome outcome = {0};
    struct hunt hunt = {.root = root, .spare = spare, .passed_over = passed_over};
    if (root <= 0)
        return outcome;
    /* If processes have evaded a hunt, stop all processes of the sandbox in one system call, which no fork can evade, until the
     * tree is dead. Other processes pause for a few milliseconds. */
    bool stopped = urgent && signal_everything(SIGSTOP);
    if (urgent)
        hurry_up();
    snprintf(thread, sizeof thread, "%d", (int)root);
    hunt.root_list = open_list(root, thread);
    uint64_t until = own_time_ns() + BURST_NS;
    unsigned quiet = 0; /* passes without a new process */
    do {
        hunt.present = hunt.fresh = 0;
        if (hunt.root_list >= 0)
            pass_through_lists(&hunt, until);
        else
            pass_through_all(&hunt);
        outcome.evaded |= outcome.passes++ > 2 && hunt.fresh;
        quiet = hunt.fresh ? 0 : quiet + 1;
    } while (hunt.present && quiet < (urgent ? URGENT_PASSES : 1) && own_time_ns() < until);
    outcome.evaded |= hunt.fresh > 0;
    outcome.present = hunt.present;
    if (stopped)
        signal_everything(SIGCONT);
    if (hunt.root_list >= 0)
        close(hunt.root_list);
    free(hunt.met.slots);
    free(hunt.queue);
    return outcome;
}
