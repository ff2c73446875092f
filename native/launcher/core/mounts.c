/* Mounts as descriptors: they are created by the process that has the rights, and attached by the one that knows the path. */
#include "core.h"

enum { IDMAP = 0x100000, OUTSIDER = 65534 };

struct attributes {
    uint64_t set, clear, propagation, userns;
};

/* Create a file system. OPTIONS (`name=value` or `name`, separated by commas) is modified while it is parsed. */
int new_filesystem(struct worker *worker, const char *type, uint64_t attributes, char *options)
{
    int context = (int)need(worker, CALL(fsopen, type, FSOPEN_CLOEXEC));
    need(worker, CALL(fsconfig, context, FSCONFIG_SET_STRING, "source", type, 0));
    while (*options) {
        char *name = options, *value = NULL;
        while (*options && *options != ',') {
            if (*options == '=' && !value) {
                *options = '\0';
                value = options + 1;
            }
            options++;
        }
        if (*options)
            *options++ = '\0';
        need(worker, CALL(fsconfig, context, value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, name, value, 0));
    }
    need(worker, CALL(fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0));
    int mount = (int)need(worker, CALL(fsmount, context, FSMOUNT_CLOEXEC, attributes));
    CALL(close, context);
    return mount;
}

/* Clone a mounted tree. USERNS -1: do not map ids. */
int clone_tree(struct worker *worker, int at, const char *path, unsigned flags, uint64_t attributes, int userns)
{
    int tree = (int)CALL(open_tree, at, path, OPEN_TREE_CLONE | (unsigned)O_CLOEXEC | flags);
    if (tree == -EINVAL && userns < 0) { /* locked mounts below it hide files, so they must be cloned, too */
        flags |= AT_RECURSIVE;
        tree = (int)CALL(open_tree, at, path, OPEN_TREE_CLONE | (unsigned)O_CLOEXEC | flags);
    }
    need(worker, tree);
    struct attributes change = {.set = attributes};
    if (userns >= 0) {
        change.set |= IDMAP;
        change.userns = (uint64_t)userns;
    }
    if (change.set)
        need(worker, CALL(mount_setattr, tree, "", AT_EMPTY_PATH | (flags & AT_RECURSIVE), &change, sizeof change));
    return tree;
}

long attach(int mount, int at, const char *path)
{
    return CALL(move_mount, mount, "", at, path, MOVE_MOUNT_F_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_T_EMPTY_PATH));
}

/* Mount an overlay. It accesses its layers with the rights of the process that mounted it. With `outsider`, that process has an id that
 * owns nothing, so that files which only the host's root may access stay inaccessible inside, even to root. */
void mount_overlay(struct worker *worker, const char *target, const char *flags, char *options)
{
    bool outsider = has_flag(flags, "outsider");
    if (outsider) { /* changing the id drops the file capabilities, and changing it back restores them */
        CALL(setfsgid, OUTSIDER);
        CALL(setfsuid, OUTSIDER);
        if (CALL(setfsuid, OUTSIDER) != OUTSIDER) /* setfsuid returns the previous id */
            worker->give_up(worker, EPERM);
    }
    long result = CALL(mount, "overlay", target, "overlay", attribute_flags(flags), options);
    if (outsider) {
        CALL(setfsuid, 0);
        CALL(setfsgid, 0);
    }
    need(worker, result);
}
