import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IState, OperationKind } from '../api';
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
    ],
    // As where files are deleted: Enter pressed too early deletes nothing.
    defaultButton: 0
  });
  return result.button.accept;
}

/** What the question whether to cancel an operation says. */
interface ICancelTexts {
  title: string;
  body: string;
  keep: string;
  cancel: string;
}

/** Operations that a click on the button offers to cancel. */
type Cancellable = Exclude<OperationKind, 'restore' | 'verify'>;

function cancelTexts(kind: Cancellable, trans: TranslationBundle) {
  const texts: Record<Cancellable, () => ICancelTexts> = {
    save: () => ({
      title: trans.__('Cancel Saving?'),
      body: trans.__(
        'The kernel runs on as before, and its earlier saved states stay.'
      ),
      keep: trans.__('Keep Saving'),
      cancel: trans.__('Cancel Save')
    }),
    park: () => ({
      title: trans.__('Cancel Parking?'),
      body: trans.__('The kernel runs on as before, and keeps its GPU.'),
      keep: trans.__('Keep Parking'),
      cancel: trans.__('Cancel Parking')
    }),
    unpark: () => ({
      title: trans.__('Cancel Unparking?'),
      body: trans.__(
        'The kernel stays parked. Cells that wait for its GPU end with an error, and can be run again.'
      ),
      keep: trans.__('Keep Unparking'),
      cancel: trans.__('Cancel Unparking')
    })
  };
  return texts[kind]();
}

/**
 * Offer to cancel an operation.
 *
 * @param done - resolves when it ended: the question is then moot
 */
export async function confirmCancel(
  kind: Cancellable,
  done: Promise<unknown>,
  trans: TranslationBundle
): Promise<boolean> {
  const { title, body, keep, cancel } = cancelTexts(kind, trans);
  const dialog = new Dialog({
    title,
    body,
    buttons: [
      Dialog.cancelButton({ label: keep }),
      Dialog.warnButton({ label: cancel })
    ]
  });
  void done.then(() => dialog.reject());
  const result = await dialog.launch();
  return result.button.accept;
}
