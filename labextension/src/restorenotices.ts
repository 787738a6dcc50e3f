import { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IOperationResult, IRestoredFrom } from './api';
import { worthKnowing } from './dialogs/details';
import type { OperationFollower } from './follower';
import { formatAge } from './format';
import { LONGEST_MESSAGE, closesAfter, dismiss, isDrawn, show } from './toasts';

/** For how long a notice counts as shown before the page has drawn it, in milliseconds. */
const DRAWING = 3000;

/** What a page has said of the last restore of a kernel: one notice. */
interface IRestoreNotice {
  id: string;
  at: number;
  /** That it was restored; empty where that was not told. */
  message: string;
  type: 'success' | 'warning';
  actions: Notification.IAction[];
  /** The cells that are undone, where they were told of. */
  gap?: {
    stateId: string;
    /** Tell of them anew. */
    tell: () => void;
  };
}

/** What the user can do about cells that are undone. */
export interface IGapActions {
  /** The state that the kernel went back to. */
  stateId: string;
  runAgain: () => void;
  dismiss: () => void;
}

/**
 * Tells that kernels were restored and which cells are undone by it: one notice
 * a kernel.
 */
export class RestoreNotices {
  constructor(private readonly _trans: TranslationBundle) {}

  /**
   * Tell that a kernel died and was brought back.
   *
   * @param kernelId - the kernel
   * @param age - how long ago its state was saved, `null` where not known
   * @param details - what else is to be known, as that a newer state is damaged
   * @param startFresh - called when the user wants a fresh kernel instead
   */
  restored(
    kernelId: string,
    age: string | null,
    details: string | null,
    startFresh: () => void
  ): void {
    const trans = this._trans;
    const message = age
      ? trans.__('The kernel died and was restored to its state saved %1.', age)
      : trans.__('The kernel died and was restored to its saved state.');
    this._tellRestored(kernelId, message, [
      ...(details ? [worthKnowing(message, details.split('\n'), trans)] : []),
      {
        label: trans.__('Start Fresh Instead'),
        caption: trans.__(
          'Restart the kernel with nothing in it; the saved state stays'
        ),
        callback: startFresh
      }
    ]);
  }

  /**
   * Tell what is to be known of a kernel that came back without this page having
   * asked for it, as that connections are closed.
   */
  cameBack(kernelId: string, from: IRestoredFrom): void {
    const trans = this._trans;
    const message =
      from.cause === 'wake'
        ? trans.__('The kernel woke up.')
        : trans.__(
            'The kernel was restored to its state saved %1.',
            formatAge(from.created, trans)
          );
    const whole = [message, ...from.warnings].join(' ');
    const isShort = whole.length <= LONGEST_MESSAGE;
    this._tellRestored(
      kernelId,
      isShort ? whole : message,
      isShort ? [] : [worthKnowing(message, from.warnings, trans)]
    );
  }

  /** Remember that this page asked for a restore, and so tells what comes of it. */
  asked(follower: OperationFollower): void {
    this._asked.set(follower.operation.kernel_id, follower);
  }

  /** Whether this page asked for a restore, and so told what came of it. */
  hasTold(kernelId: string, from: IRestoredFrom): boolean {
    const asked = this._asked.get(kernelId)?.operation;
    const at = new Date(from.restored).getTime();
    return (
      !!asked &&
      new Date(asked.started).getTime() <= at &&
      (!asked.finished || at <= new Date(asked.finished).getTime())
    );
  }

  /**
   * A restore that this page asked for is done.
   *
   * @param notice - the notification that says so
   */
  ended(
    { kernel_id, state_id }: IOperationResult,
    notice: Pick<IRestoreNotice, 'id' | 'message' | 'type' | 'actions'>
  ): void {
    const before = this._restores.get(kernel_id);
    this._restores.set(kernel_id, { ...notice, at: Date.now() });
    if (before) {
      // Of an earlier restore, or of this one's gap, which was quicker.
      dismiss(before.id);
      if (before.gap?.stateId === state_id && isShown(before)) {
        before.gap.tell();
      }
    }
  }

  /**
   * Tell which cells a restored kernel knows nothing of; in one notice with
   * what was said of the restore.
   *
   * @param isNew - `false` only changes the notice, where it is still shown
   */
  gap(
    kernelId: string,
    text: string,
    gapActions: IGapActions,
    isNew: boolean
  ): void {
    const { stateId, runAgain } = gapActions;
    const trans = this._trans;
    const said = this._restores.get(kernelId);
    const shown = !!said && isShown(said);
    if (!shown && !isNew) {
      return;
    }
    const base = shown ? said : null;
    if (said && !base) {
      dismiss(said.id);
    }
    const id = show(
      base?.id,
      base?.message ? `${base.message} ${text}` : text,
      'warning',
      {
        autoClose: false,
        actions: [
          {
            label: trans.__('Run These Again'),
            caption: trans.__('Run the marked cells in their former order'),
            callback: event => {
              // It says how many are left, and goes with the last one.
              event.preventDefault();
              runAgain();
            }
          },
          ...(base?.actions ?? []),
          {
            label: trans.__('Dismiss'),
            caption: trans.__('Remove the marks'),
            callback: gapActions.dismiss
          }
        ]
      }
    );
    this._restores.set(kernelId, {
      message: '',
      type: 'warning',
      actions: [],
      ...base,
      id,
      // A notice that the user closed is not brought back by a change.
      at: base?.at ?? Date.now(),
      gap: { stateId, tell: () => this.gap(kernelId, text, gapActions, true) }
    });
  }

  /**
   * No cell is marked any more.
   *
   * @param keep - whether what else the notice says stays
   */
  gapClosed(kernelId: string, keep: boolean): void {
    const said = this._restores.get(kernelId);
    if (!said?.gap) {
      return;
    }
    const { id, message, type, actions } = said;
    if (!keep || !message) {
      this._restores.delete(kernelId);
      dismiss(id);
      return;
    }
    const autoClose = closesAfter(type);
    this._restores.set(kernelId, {
      ...said,
      id: isShown(said) ? show(id, message, type, { autoClose, actions }) : id,
      gap: undefined
    });
  }

  private _tellRestored(
    kernelId: string,
    message: string,
    actions: Notification.IAction[]
  ): void {
    const said = { at: Date.now(), message, type: 'warning' as const, actions };
    const before = this._restores.get(kernelId);
    if (before?.gap && isShown(before)) {
      // It was quicker: one notice for both.
      this._restores.set(kernelId, { ...before, ...said });
      before.gap.tell();
      return;
    }
    if (before) {
      dismiss(before.id);
    }
    const options = { autoClose: false as const, actions };
    const id = Notification.emit(message, 'warning', options);
    this._restores.set(kernelId, { ...said, id });
  }

  /** The last restore of each kernel that this page asked for. */
  private _asked = new Map<string, OperationFollower>();
  private _restores = new Map<string, IRestoreNotice>();
}

function isShown(notice: IRestoreNotice): boolean {
  return isDrawn(notice.id) || Date.now() - notice.at < DRAWING;
}
