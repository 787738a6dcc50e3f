import type { TranslationBundle } from '@jupyterlab/translation';
import type { LabIcon } from '@jupyterlab/ui-components';

import type { IKernel, IOperation, IParked } from './api';
import { formatAge, formatPercent, formatSize } from './format';
import {
  hibernatedIcon,
  parkedIcon,
  restoreIcon,
  savedIcon,
  saveIcon,
  unavailableIcon
} from './icons';
import type { IKernelEntry } from './model';
import type { IErrorBody } from './request';
import { operationTexts, waitText } from './texts';

/** What the toolbar button shows. */
export interface IFace {
  state:
    | 'ready'
    | 'saving'
    | 'saved'
    | 'unavailable'
    | 'restoring'
    | 'hibernated'
    | 'gpu-lost'
    | 'moving'
    | 'parked';
  icon: LabIcon;
  /** Text beside the icon, `undefined` for none. */
  label?: string;
  /** Tooltip, and the button's name for a screen reader. */
  title: string;
  /** What a screen reader says when the button gets this face. */
  announcement: string;
  /** Why the kernel cannot be saved. */
  error?: IErrorBody;
}

/**
 * The button's face for a kernel.
 *
 * @param entry - what is known of the kernel, `null` where there is none
 */
export function faceOf(
  entry: IKernelEntry | null,
  trans: TranslationBundle
): IFace {
  if (!entry) {
    return unavailable(
      {
        message: trans.__('This notebook has no kernel.'),
        reason: 'no_kernel',
        hint: trans.__('Start a kernel first.'),
        details: null
      },
      trans
    );
  }

  const { kernel, error, operation } = entry;
  if (operation?.kind === 'park' || operation?.kind === 'unpark') {
    return moving(operation, kernel?.parked ?? null, trans);
  }
  if (operation) {
    const percent = formatPercent(operation.progress);
    const waits = waitText(operation, trans);
    if (waits) {
      return waitsForWork('saving', saveIcon, waits, trans);
    }
    return operation.kind === 'save'
      ? {
          state: 'saving',
          icon: saveIcon,
          label: percent,
          title: trans.__('Saving kernel state: %1 (click to cancel)', percent),
          announcement: trans.__('Saving kernel state')
        }
      : {
          state: 'restoring',
          icon: restoreIcon,
          label: percent,
          title: trans.__('Restoring kernel state: %1', percent),
          announcement: trans.__('Restoring kernel state')
        };
  }

  if (error) {
    return unavailable(explain(error, trans), trans);
  }
  if (!kernel) {
    return {
      state: 'unavailable',
      icon: saveIcon,
      title: trans.__('Looking whether this kernel can be saved…'),
      announcement: ''
    };
  }
  if (kernel.execution_state === 'hibernated') {
    const failure = wakeError(kernel);
    return {
      state: 'hibernated',
      icon: hibernatedIcon,
      label: trans.__('Hibernated'),
      title: failure
        ? trans.__('%1 (click to try again)', failure.message)
        : trans.__('Hibernated; wakes on the next run (click to wake)'),
      announcement: trans.__('Kernel hibernated')
    };
  }
  if (kernel.gpu_lost) {
    return {
      state: 'gpu-lost',
      icon: unavailableIcon,
      label: trans.__('GPU lost'),
      title: kernel.last_state
        ? trans.__('%1 (click to restore a saved state)', kernel.gpu_lost)
        : trans.__('%1 (click for details)', kernel.gpu_lost),
      announcement: kernel.gpu_lost
    };
  }
  if (kernel.parked) {
    return {
      state: 'parked',
      icon: parkedIcon,
      label: trans.__('Parked'),
      title: trans.__(
        'GPU parked: %1 in host memory; comes back on the next run (click to get it back now)',
        formatSize(kernel.parked.host_bytes)
      ),
      announcement: trans.__('GPU parked')
    };
  }
  if (!kernel.savable) {
    return unavailable(
      kernel.error ?? {
        message: trans.__('This kernel cannot be saved.'),
        reason: 'not_savable',
        hint: null,
        details: null
      },
      trans
    );
  }
  if (kernel.last_state) {
    const created = kernel.last_state.created;
    return {
      state: 'saved',
      icon: savedIcon,
      label: trans.__('Saved %1', formatAge(created, trans, 'narrow')),
      title:
        kernel.last_state.reason === 'user'
          ? trans.__('Save kernel state (saved %1)', formatAge(created, trans))
          : trans.__(
              'Save kernel state (saved automatically %1)',
              formatAge(created, trans)
            ),
      announcement: trans.__('Kernel state saved')
    };
  }
  return {
    state: 'ready',
    icon: saveIcon,
    title: trans.__('Save kernel state'),
    announcement: ''
  };
}

/** What the kernel has running on a GPU has to end first. */
function waitsForWork(
  state: IFace['state'],
  icon: LabIcon,
  waits: string,
  trans: TranslationBundle
): IFace {
  return {
    state,
    icon,
    label: trans.__('Waits for GPU'),
    title: trans.__('%1 (click to cancel)', waits),
    // Without the seconds, which would be read out one by one.
    announcement: trans.__('Waiting for the GPU to finish its work')
  };
}

/** Why a hibernated kernel did not wake, `null` where nobody has tried. */
export function wakeError(kernel: IKernel): IErrorBody | null {
  const { execution_state, error } = kernel;
  const isAsleep = execution_state === 'hibernated';
  return isAsleep && error?.reason === 'restore_failed' ? error : null;
}

/** GPU memory goes to host memory or back, or waits for that. */
function moving(
  operation: IOperation,
  parked: IParked | null,
  trans: TranslationBundle
): IFace {
  const { kind, phase } = operation;
  const waitsFor = waitText(operation, trans);
  if (phase === 'gpu' && waitsFor) {
    return waitsForWork('moving', parkedIcon, waitsFor, trans);
  }
  const position = kind === 'unpark' && phase === 'waiting' && parked?.position;
  if (!position) {
    const { going } = operationTexts(kind, trans);
    return {
      state: 'moving',
      icon: parkedIcon,
      label: kind === 'park' ? trans.__('Parking…') : trans.__('Unparking…'),
      title: trans.__('%1 (click to cancel)', going),
      announcement: going
    };
  }
  const before = position - 1;
  const waits =
    before > 0
      ? trans._n(
          'GPU parked; waits for the GPU after one other kernel',
          'GPU parked; waits for the GPU after %1 other kernels',
          before
        )
      : trans.__('GPU parked; next in line, waits for room on the GPU');
  return {
    state: 'parked',
    icon: parkedIcon,
    label:
      before > 0
        ? trans.__('Waits for GPU, no. %1 in line', position)
        : trans.__('Waits for GPU'),
    title: trans.__('%1 (click to cancel)', waits),
    announcement: waits
  };
}

/** A refusal in the user's words, where the server could not find them. */
export function explain(
  error: IErrorBody,
  trans: TranslationBundle
): IErrorBody {
  switch (error.reason) {
    case 'unreachable':
      return {
        ...error,
        message: trans.__('The Jupyter server cannot be reached.'),
        details: error.message
      };
    case 'no_extension':
      return {
        ...error,
        message: trans.__(
          'The server extension of jupyter-gpu-ckpt is not enabled.'
        ),
        hint: trans.__(
          'Run “jupyter server extension enable jupyter_gpu_ckpt” and restart the server.'
        )
      };
    default:
      return error;
  }
}

function unavailable(error: IErrorBody, trans: TranslationBundle): IFace {
  const title = trans.__('Cannot save kernel state: %1', error.message);
  return {
    state: 'unavailable',
    icon: unavailableIcon,
    title: error.hint ? `${title}\n${error.hint}` : title,
    announcement: title,
    error
  };
}
