/* What a program that makes a sandbox must not pass on of its user's: the keys of the session, core dumps, and the very files of
 * /usr. A lock or a watch on a file is on the inode, so what all sandboxes have bound from the host they could use to reach one
 * another; through an overlay each has inodes of its own. */
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
    /* Without keys in the kernel there is nothing to leave behind. */
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

/* The files below BASE, and the host's /usr as `BASE/usr`, get inodes of their own, for us and whom we start. `BASE/../empty` is an
 * empty directory: an overlay has two layers at least. A kernel that gives ordinary users no overlay leaves the shared files there. */
void own_files(const char *base)
{
    unsigned uid = geteuid(), gid = getegid();
    prctl(PR_SET_DUMPABLE, 1); /* or our files in /proc are root's */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0 || map_itself(uid, gid) < 0 || chdir(base) < 0)
        die("cannot make namespaces");
    if (overlay(".", ".") == 0 && chdir(base) < 0)
        die(base);
    if (overlay("/usr", "usr") < 0 && mount("/usr", "usr", NULL, MS_BIND | MS_REC, NULL) < 0)
        die("cannot mount /usr");
    if (chdir("/") < 0)
        die("/");
}
