/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_pace.h"

#include "io.h"

static const double longest_short_call = 20.0; /* seconds for one that only asks or unlocks */

double cuda_short_call(const struct cuda_work *work)
{
    return work->copy_timeout < longest_short_call ? work->copy_timeout : longest_short_call;
}

bool cuda_step(struct cuda_work *work, enum cuda_op op, pid_t pid, double limit)
{
    return work->step == NULL || work->step(work->data, op, pid, limit);
}

double cuda_forward(const struct cuda_work *work, double most)
{
    double grace = work->copy_timeout < CUDA_GRACE ? work->copy_timeout : CUDA_GRACE;
    double left = work->deadline - io_now();
    if (work->deadline <= 0.0)
        return most;
    return (left < 0.0 ? 0.0 : left < most ? left : most) + grace;
}

bool cuda_late(const struct cuda_work *work)
{
    return work->deadline > 0.0 && io_now() >= work->deadline;
}

bool cuda_too_late(struct kc_result *result)
{
    return kc_fail(result, KC_TIMEOUT, "What is done on the GPU took too long, and was undone.");
}

bool cuda_cancelled(struct kc_result *result)
{
    return kc_fail(result, KC_CANCELLED, "The save was cancelled; the kernel runs on.");
}

bool cuda_alive(const struct cuda_work *work, const struct cuda_task *task)
{
    return work->alive == NULL || work->alive(task);
}
