/* Dropping what a program that makes a sandbox must not pass on from its user: the session's keyring, core dumps, and the inodes
 * of /usr. File locks and watches apply to inodes, so sandboxes that share the host's files could use them to communicate with
 * one another; through an overlay each sandbox has its own inodes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

void leave_session(void)
{
    /* ENOSYS: the kernel has no keyrings, so there is nothing to leave. */
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS)
        die("cannot leave the keyring of the session");
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
}

static int write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t done = fd < 0 ? -1 : write(fd, text, strlen(text));
    if (fd >= 0)
        close(fd);
    return done < 0 ? -1 : 0;
}

static int map_itself(unsigned uid, unsigned gid)
{
    char users[64], groups[64];
    snprintf(users, sizeof users, "%u %u 1\n", uid, uid);
    snprintf(groups, sizeof groups, "%u %u 1\n", gid, gid);
    return write_text("/proc/self/setgroups", "deny") < 0 || write_text("/proc/self/uid_map", users) < 0
            || write_text("/proc/self/gid_map", groups) < 0
        ? -1
        : 0;
}

static int overlay(const char *lower, const char *target)
{
    char options[64];
    snprintf(options, sizeof options, "lowerdir=%s:../empty,userxattr", lower);
    return mount("overlay", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, options);
}

/* Give the files below BASE, and the host's /usr as `BASE/usr`, new inodes for this process and its children. `BASE/../empty` is an
 * empty directory, because an overlay needs at least two layers. If ordinary users may not mount overlays, the files stay shared. */
void own_files(const char *base)
{
    unsigned uid = geteuid(), gid = getegid();
    prctl(PR_SET_DUMPABLE, 1); /* otherwise this process's files in /proc belong to root */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0 || map_itself(uid, gid) < 0 || chdir(base) < 0)
        die("cannot make namespaces");
    if (overlay(".", ".") == 0 && chdir(base) < 0)
        die(base);
    if (overlay("/usr", "usr") < 0 && mount("/usr", "usr", NULL, MS_BIND | MS_REC, NULL) < 0)
        die("cannot mount /usr");
    if (chdir("/") < 0)
        die("/");
}
