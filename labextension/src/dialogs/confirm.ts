import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IState } from '../api';
import { formatAge } from '../format';

/** Ask before a rollback throws away what the kernel did since the state. */
export async function confirmRollback(
  state: IState,
  trans: TranslationBundle
): Promise<boolean> {
  const result = await showDialog({
    title: trans.__('Roll Back Kernel?'),
    body: trans.__(
      'The kernel goes back to its state saved %1. Everything it did since then is lost, unless you save its present state first.',
      formatAge(state.created, trans)
    ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Roll Back') })
    ]
  });
  return result.button.accept;
}

/** Ask before a state is deleted for good. */
export async function confirmDelete(
  state: IState,
  trans: TranslationBundle
): Promise<boolean> {
  const result = await showDialog({
    title: trans.__('Delete Saved State?'),
    body: trans.__(
      'The state saved %1 is deleted permanently. The kernel itself is not touched.',
      formatAge(state.created, trans)
    ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Delete') })
    ]
  });
  return result.button.accept;
}

/**
 * Offer to cancel a save.
 *
 * @param done - resolves when the save ended: the question is then moot
 */
export async function confirmCancel(
  done: Promise<unknown>,
  trans: TranslationBundle
): Promise<boolean> {
  const dialog = new Dialog({
    title: trans.__('Cancel Saving?'),
    body: trans.__(
      'The kernel runs on as before, and its earlier saved states stay.'
    ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Keep Saving') }),
      Dialog.warnButton({ label: trans.__('Cancel Save') })
    ]
  });
  void done.then(() => dialog.reject());
  const result = await dialog.launch();
  return result.button.accept;
}
