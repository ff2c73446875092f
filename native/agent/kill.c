/* Killing all that descends from a process, while it tries to get away.
 *
 * A process that has SIGKILL pending can no longer fork. So of a tree that keeps its shape nothing can be missed: each one that we find is
 * killed first, with its group, and then asked for its children. What forks and exits as fast as it can moves from below its
 * parent to below the root just after we looked there. Against that only speed helps. So a hunt looks at the root's children again and
 * again without pause, through the kernel's own list of them, and touches nobody twice, for the dead that nobody has waited for yet
 * may be thousands. Only when nobody new is there does it look below those it has killed: it need not, they will die and
 * leave their children to the root, but a tall tree falls faster so.
 *
 * Kernels may be built without these lists; then all of /proc is read, which takes milliseconds instead of microseconds.
 *
 * Nothing in the agent sends a signal but through the three functions below.
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
#define BURST_NS 10000000u /* of our own time: then others get their turn. Where many want to run, one pass may last far longer */

/* kill(2) takes 0, -1 and other negative numbers for whole crowds, among them our own group and all that we may signal at all. A
 * number that we got wrong must never come to mean one of these, nor the agent itself, nor the init of a machine that it runs on. */
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

/* Everything but ourselves. Only for the init of a sandbox, to whom nothing outside of it exists. */
static bool signal_everything(int number) { return getpid() == 1 && kill(-1, number) == 0; }

static uint64_t own_time_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Each number once; open addressing, 0 is free. */
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

/* False: it was there before. Without memory everything is new, and the hunt only slower. */
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
    struct set met;  /* and killed */
    pid_t *queue;    /* whose children are not known yet */
    size_t count, capacity;
    size_t present;  /* of those below the root that this pass came across */
    size_t fresh;    /* of these, for the first time */
};

static void enqueue(struct hunt *hunt, pid_t pid)
{
    if (hunt->count == hunt->capacity) {
        size_t capacity = hunt->capacity ? hunt->capacity * 2 : 64;
        pid_t *larger = capacity <= MOST_FOUND ? realloc(hunt->queue, capacity * sizeof *larger) : NULL;
        if (!larger)
            return; /* what is below it comes to the root when it has died */
        hunt->queue = larger;
        hunt->capacity = capacity;
    }
    hunt->queue[hunt->count++] = pid;
}

static void meet(struct hunt *hunt, pid_t pid)
{
    if (pid <= 1 || pid == hunt->root || (hunt->passed_over && hunt->passed_over(pid)))
        return; /* nor what is below it */
    if (pid == hunt->spare) {
        enqueue(hunt, pid);
        return;
    }
    hunt->present++;
    if (!set_add(&hunt->met, pid))
        return; /* dying, and it cannot have children any more that we did not see */
    hunt->fresh++;
    if (!hunt->spare) { /* else it may be in the group of the one to be spared */
        pid_t group = getpgid(pid);
        if (group != hunt->root) /* a command that was just born is still in its supervisor's group */
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

/* The children of all threads of a process. */
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

/* Supervisors and the agent have one thread. */
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
    /* The name in parentheses may hold anything: the last parenthesis ends it. */
    const char *after = strrchr(text, ')');
    int parent;
    if (!after || sscanf(after + 1, " %c %d", &state, &parent) != 2)
        return false;
    *task = (struct task){.pid = (pid_t)atoi(name), .parent = parent};
    return true;
}

/* All processes that can be seen. The caller frees the result; NULL when nothing can be seen. */
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
    hunt->present += !tasks; /* not knowing is not the same as nothing being there */
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

/* Ahead of all ordinary processes, or of those in our scheduling group, where that is allowed. New processes never inherit the
 * first; the second is given up before each is made, and when all is done. */
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
    /* What has outrun us once is stopped with everything else, at one stroke of the kernel that no fork escapes, until its tree is
     * dead. Others notice a pause of some milliseconds. */
    bool stopped = urgent && signal_everything(SIGSTOP);
    if (urgent)
        hurry_up();
    snprintf(thread, sizeof thread, "%d", (int)root);
    hunt.root_list = open_list(root, thread);
    uint64_t until = own_time_ns() + BURST_NS;
    unsigned quiet = 0; /* passes without anybody new */
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
