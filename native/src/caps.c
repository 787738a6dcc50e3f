/* SPDX-License-Identifier: BSD-3-Clause */
#include "caps.h"

#include <errno.h>
#include <linux/capability.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "procfs.h"

#ifndef CAP_CHECKPOINT_RESTORE
#define CAP_CHECKPOINT_RESTORE 40
#endif

/* What CRIU can make use of; nothing else is passed on to it. */
static const int for_criu[] = {CAP_CHECKPOINT_RESTORE, CAP_NET_ADMIN, CAP_SETPCAP,
                               CAP_SYS_PTRACE,         CAP_SYS_ADMIN, CAP_SYS_RESOURCE};

struct sets {
    uint64_t effective, permitted, inheritable;
};

static struct sets start;
static uint64_t start_ambient;

static uint64_t bit(int capability)
{
    return (uint64_t)1 << capability;
}

static bool get(struct sets *sets)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct data[2];
    memset(data, 0, sizeof(data));
    if (syscall(SYS_capget, &header, data) != 0)
        return false;
    sets->effective = (uint64_t)data[1].effective << 32 | data[0].effective;
    sets->permitted = (uint64_t)data[1].permitted << 32 | data[0].permitted;
    sets->inheritable = (uint64_t)data[1].inheritable << 32 | data[0].inheritable;
    return true;
}

static bool set(const struct sets *sets)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)sets->effective,
         .permitted = (uint32_t)sets->permitted,
         .inheritable = (uint32_t)sets->inheritable},
        {.effective = (uint32_t)(sets->effective >> 32),
         .permitted = (uint32_t)(sets->permitted >> 32),
         .inheritable = (uint32_t)(sets->inheritable >> 32)}};
    return syscall(SYS_capset, &header, data) == 0;
}

bool caps_init(struct kc_result *result)
{
    /* Set-user-ID would give rights that the rules here know nothing of. */
    if (getuid() != geteuid() || getgid() != getegid())
        return kc_fail(result, KC_USAGE,
                       "kernel-capture must not be set-user-ID or set-group-ID; "
                       "give it file capabilities instead.");
    if (!get(&start))
        return kc_fail_errno(result, KC_INTERNAL, errno, "capget");
    start_ambient = 0;
    for (int cap = 0; cap < 64; cap++)
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, cap, 0, 0) == 1)
            start_ambient |= bit(cap);
    if (!caps_root())
        caps_lower();
    return true;
}

bool caps_root(void)
{
    return geteuid() == 0;
}

bool caps_permitted(int capability)
{
    return (start.permitted & bit(capability)) != 0;
}

uint64_t caps_callers_own(void)
{
    return caps_root() ? start.permitted : start_ambient;
}

uint64_t caps_callers_inheritable(void)
{
    return start.inheritable | caps_callers_own();
}

bool caps_beyond_caller(void)
{
    return (start.permitted & ~caps_callers_own()) != 0;
}

bool caps_raise(int capability)
{
    struct sets sets;
    if (!caps_permitted(capability) || !get(&sets))
        return false;
    sets.effective |= bit(capability);
    return set(&sets);
}

void caps_raise_all(void)
{
    struct sets sets;
    if (caps_root() || !get(&sets))
        return;
    sets.effective = sets.permitted;
    set(&sets);
}

void caps_lower(void)
{
    struct sets sets;
    if (caps_root() || !get(&sets))
        return;
    sets.effective = 0;
    set(&sets);
}

bool caps_yama_forbids(void)
{
    long scope = proc_sysctl("sys/kernel/yama/ptrace_scope", 0);
    return scope >= 3 || (scope >= 1 && !caps_permitted(CAP_SYS_PTRACE));
}

bool caps_can_capture(struct kc_result *result)
{
    if (!caps_permitted(CAP_CHECKPOINT_RESTORE) && !caps_permitted(CAP_SYS_ADMIN))
        return kc_fail(result, KC_NO_CAPABILITY,
                       "The right to capture processes (CAP_CHECKPOINT_RESTORE) is missing.");
    if (!caps_permitted(CAP_NET_ADMIN))
        return kc_fail(result, KC_NO_CAPABILITY,
                       "The right to capture network connections (CAP_NET_ADMIN) is missing.");
    if (!caps_permitted(CAP_SETPCAP))
        return kc_fail(result, KC_NO_CAPABILITY,
                       "The right to restore capability sets (CAP_SETPCAP) is missing.");
    if (caps_yama_forbids())
        return kc_fail(result, KC_NO_CAPABILITY,
                       "This node lets processes be traced by their ancestors only "
                       "(kernel.yama.ptrace_scope), and CAP_SYS_PTRACE is missing.");
    return true;
}

bool caps_unprivileged(void)
{
    /* Root of a container often lacks what CRIU takes for granted of root. */
    return !caps_root() || !caps_permitted(CAP_SYS_ADMIN);
}

bool caps_give_to_criu(void)
{
    if (caps_root())
        return true;
    struct sets sets;
    if (!get(&sets))
        return false;
    uint64_t wanted = 0;
    for (size_t i = 0; i < sizeof(for_criu) / sizeof(for_criu[0]); i++)
        wanted |= bit(for_criu[i]) & sets.permitted;
    sets.inheritable = wanted;
    sets.effective = wanted;
    if (!set(&sets))
        return false;
    for (int cap = 0; cap < 64; cap++)
        if ((wanted & bit(cap)) != 0 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) != 0)
            return false;
    return true;
}

bool caps_drop_to_callers(void)
{
    if (caps_root())
        return true;
    /* Lowering a permitted capability lowers it in the ambient set too; the caller's stay. */
    struct sets sets = {.effective = start.effective & start_ambient,
                        .permitted = start_ambient,
                        .inheritable = start.inheritable};
    return set(&sets);
}
