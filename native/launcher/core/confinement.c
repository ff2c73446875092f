/* The last steps before the agent is executed: dropping capabilities and installing the filter. */
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/prctl.h>
#include <linux/seccomp.h>
#include <linux/uio.h>

#include "core.h"

/* Set the effective and permitted capabilities; the inheritable ones are empty. */
long set_capabilities(uint64_t capabilities)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)capabilities, .permitted = (uint32_t)capabilities},
        {.effective = (uint32_t)(capabilities >> 32), .permitted = (uint32_t)(capabilities >> 32)},
    };
    return CALL(capset, &header, data);
}

/* Drop all other capabilities from every set, including the bounding set. */
void keep_only(struct worker *worker, uint64_t capabilities)
{
    for (int capability = 0; capability < 64; capability++) {
        if (capabilities >> capability & 1)
            continue;
        long error = CALL(prctl, PR_CAPBSET_DROP, capability, 0, 0, 0);
        if (error == -EINVAL) /* beyond the kernel's last capability */
            break;
        need(worker, error);
    }
    need(worker, set_capabilities(capabilities));
}

/* Send the filter's listener to the supervisor, and close it here. */
static void hand_over(struct worker *worker, int listener, int guard)
{
    struct rights rights = {.length = RIGHTS_HEADER + sizeof(int), .level = SOCKET_LEVEL, .type = RIGHTS_TYPE, .fds = {listener}};
    struct iovec part = {"", 1};
    struct message message = {.parts = &part, .part_count = 1, .control = &rights, .control_length = RIGHTS_HEADER + 2 * sizeof(int)};
    need(worker, CALL(sendmsg, guard, &message, NO_SIGNAL));
    CALL(close, listener);
    CALL(close, guard);
}

/* Install a filter that was compiled in advance, because compiling it here would take longer than everything else. GUARD is the socket
 * of the supervisor that decides about some calls, or -1. */
void install_filter(struct worker *worker, char *code, size_t length, int guard)
{
    if (!length || length % sizeof(struct sock_filter) || length / sizeof(struct sock_filter) > BPF_MAXINSNS)
        worker->give_up(worker, EINVAL);
    struct sock_fprog program = {.len = (unsigned short)(length / sizeof(struct sock_filter)),
                                 .filter = (struct sock_filter *)(void *)code};
    int flags = guard < 0 ? 0 : SECCOMP_FILTER_FLAG_NEW_LISTENER;
    long listener = need(worker, CALL(seccomp, SECCOMP_SET_MODE_FILTER, flags, &program));
    if (guard >= 0)
        hand_over(worker, (int)listener, guard);
}
