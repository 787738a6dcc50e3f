import type { TranslationBundle } from '@jupyterlab/translation';

import type { IOperation, OperationKind } from './api';
import type { IErrorBody } from './request';

/** What is said of an operation as it goes and ends. */
export interface IOperationTexts {
  going: string;
  cancelled: string;
  /** The title of what is known of a failure. */
  failed: string;
  /** @param size, seconds - what was moved and in which time, in words */
  done: (size: string, seconds: string) => string;
}

/** What is said of operations of a kind. */
export function operationTexts(
  kind: OperationKind,
  trans: TranslationBundle
): IOperationTexts {
  const texts: Record<OperationKind, () => IOperationTexts> = {
    save: () => ({
      going: trans.__('Saving kernel state…'),
      cancelled: trans.__(
        'Saving the kernel state was cancelled. The kernel runs on.'
      ),
      failed: trans.__('Saving Kernel State Failed'),
      done: (size, seconds) =>
        trans.__('Kernel state saved (%1 in %2)', size, seconds)
    }),
    restore: () => ({
      going: trans.__('Restoring kernel state…'),
      cancelled: trans.__(
        'Restoring was cancelled. The saved state is still there.'
      ),
      failed: trans.__('Restoring Kernel State Failed'),
      done: (size, seconds) =>
        trans.__('Kernel state restored (%1 in %2)', size, seconds)
    }),
    verify: () => ({
      going: trans.__('Verifying kernel state…'),
      cancelled: trans.__('Verifying was cancelled.'),
      failed: trans.__('Verifying Kernel State Failed'),
      done: (size, seconds) =>
        trans.__('Kernel state verified (%1 in %2)', size, seconds)
    }),
    park: () => ({
      going: trans.__('Parking GPU…'),
      cancelled: trans.__('Parking was cancelled. The kernel runs on.'),
      failed: trans.__('Parking GPU Failed'),
      done: (size, seconds) => trans.__('GPU parked (%1 in %2)', size, seconds)
    }),
    unpark: () => ({
      going: trans.__('Unparking GPU…'),
      cancelled: trans.__('Unparking was cancelled. The kernel stays parked.'),
      failed: trans.__('Unparking GPU Failed'),
      done: (size, seconds) =>
        trans.__('GPU unparked (%1 in %2)', size, seconds)
    })
  };
  return texts[kind]();
}

/** What an operation waits for, `null` where it goes on. */
export function waitText(
  { kind, phase, phaseSeen }: IOperation,
  trans: TranslationBundle
): string | null {
  if (kind === 'unpark' && phase === 'waiting') {
    return trans.__('Waiting for room on the GPU…');
  }
  if (phase !== 'gpu') {
    return null;
  }
  // The server says so after the first second.
  const seconds = 1 + (Date.now() - (phaseSeen ?? Date.now())) / 1000;
  return trans.__(
    'Waiting for the GPU to finish its work (%1 s)',
    Math.round(seconds)
  );
}

/** What went wrong, and what to do about it. */
export function errorLine({ message, hint }: IErrorBody): string {
  return hint ? `${message} ${hint}` : message;
}
