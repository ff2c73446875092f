/* Killing all that descends from a process, while it tries to get away.
 *
 * A tree can fork while we look at it. So what we find is killed by process group first (the kernel does that atomically
 * against fork), then one by one, and the caller looks again until its supervisor is gone. Against something that forks, changes
 * its group and exits as fast as it can, only speed helps: the kernel's own list of a process's children is read and
 * acted upon in microseconds. Kernels may be built without that list; then all of /proc is read, which takes milliseconds.
 */
#define _GNU_SOURCE
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FOUND = 1 << 20 };

struct pids {
    pid_t *list;
    size_t count, capacity;
};

static void add_pid(struct pids *pids, pid_t pid)
{
    if (pids->count == pids->capacity) {
        size_t capacity = pids->capacity ? pids->capacity * 2 : 64;
        pid_t *larger = realloc(pids->list, capacity * sizeof *larger);
        if (!larger)
            return; /* it is found again in the next round */
        pids->list = larger;
        pids->capacity = capacity;
    }
    pids->list[pids->count++] = pid;
}

static void kill_with_group(pid_t pid, pid_t root)
{
    pid_t group = getpgid(pid);
    if (group > 1 && group != root && group != getpgrp()) /* a command that was just born is still in its supervisor's group */
        kill(-group, SIGKILL);
    kill(pid, SIGKILL);
}

/* --- through the lists of children -------------------------------------------------------------------------------------- */

static void add_list(const char *path, struct pids *pids)
{
    char text[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    pid_t pid = 0;
    if (fd < 0)
        return;
    for (ssize_t length; (length = read(fd, text, sizeof text)) > 0;) {
        for (ssize_t i = 0; i < length; i++) {
            if (text[i] >= '0' && text[i] <= '9') {
                pid = pid * 10 + (text[i] - '0');
            } else {
                if (pid)
                    add_pid(pids, pid);
                pid = 0;
            }
        }
    }
    close(fd);
}

/* The children of all threads of a process. */
static void add_children_of(pid_t pid, struct pids *pids)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *threads = opendir(path);
    for (struct dirent *entry; threads && (entry = readdir(threads));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.10s/children", (int)pid, entry->d_name);
        add_list(path, pids);
    }
    if (threads)
        closedir(threads);
}

static bool has_lists(void)
{
    static int known; /* 0: not looked yet */
    if (!known) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
        known = access(path, R_OK) == 0 ? 1 : -1;
    }
    return known > 0;
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

/* All processes that can be seen. The caller frees the result. */
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

static void add_children_from(struct task *tasks, size_t count, pid_t parent, struct pids *pids)
{
    for (size_t i = 0; i < count; i++) {
        if (tasks[i].seen || tasks[i].parent != parent)
            continue;
        tasks[i].seen = true;
        add_pid(pids, tasks[i].pid);
    }
}

/* --- both --------------------------------------------------------------------------------------------------------------------- */

size_t kill_below(pid_t root, pid_t spare, bool (*passed_over)(pid_t pid))
{
    struct pids found = {0};
    size_t killed = 0, count = 0;
    struct task *tasks = has_lists() ? NULL : read_tasks(&count);
    add_pid(&found, root);
    for (size_t at = 0; at < found.count && found.count < MOST_FOUND; at++) {
        size_t first = found.count;
        if (tasks)
            add_children_from(tasks, count, found.list[at], &found);
        else if (found.list[at])
            add_children_of(found.list[at], &found);
        for (size_t i = first; i < found.count; i++) {
            if (passed_over && passed_over(found.list[i])) {
                found.list[i] = 0; /* nor what is below it */
            } else if (found.list[i] != spare) {
                if (spare)
                    kill(found.list[i], SIGKILL); /* it may be in the group of the one to be spared */
                else
                    kill_with_group(found.list[i], root);
                killed++;
            }
        }
    }
    free(found.list);
    free(tasks);
    return killed;
}
