import { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type {
  IOperation,
  IRestoredFrom,
  IVerification,
  KernelStateAPI
} from './api';
import { foundText, lostTexts } from './dialogs/check';
import { detailsAction } from './dialogs/details';
import { explain } from './face';
import type { OperationFollower } from './follower';
import { formatAge, formatPercent, formatSeconds, formatSize } from './format';
import type { IErrorBody, RequestError } from './request';
import { LONGEST_MESSAGE, dismiss, isDrawn, show } from './toasts';

/** How long a success stays on screen, in milliseconds. */
const SUCCESS_SHOWN = 6000;

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

/** Tells the user how operations go and end. */
export class Notices {
  constructor(
    private readonly _api: KernelStateAPI,
    private readonly _trans: TranslationBundle
  ) {}

  /**
   * Show an operation from its start to its end.
   *
   * @returns the operation at its end; never rejects
   */
  async follow(follower: OperationFollower): Promise<IOperation> {
    const trans = this._trans;
    const { operation } = follower;
    const text = {
      save: trans.__('Saving kernel state…'),
      restore: trans.__('Restoring kernel state…'),
      verify: trans.__('Verifying kernel state…')
    }[operation.kind];
    const id = Notification.emit(text, 'in-progress', {
      autoClose: false,
      progress: operation.progress,
      actions: [
        {
          label: trans.__('Cancel'),
          callback: event => {
            // The notification stays until the server says it is cancelled.
            event.preventDefault();
            void this.cancel(operation);
          }
        }
      ]
    });
    follower.changed.connect((_, { progress }) => {
      // An update would bring back a notification that the user has hidden.
      if (isDrawn(id)) {
        const message = `${text} ${formatPercent(progress)}`;
        Notification.update({ id, message, progress });
      }
    });
    if (operation.kind === 'restore') {
      this._asked.set(operation.kernel_id, follower);
    }
    const final = await follower.done;
    this._ended(final, id);
    return final;
  }

  /** Ask for an operation to be cancelled. */
  async cancel(operation: IOperation): Promise<void> {
    try {
      await this._api.cancel(operation.id);
    } catch (error) {
      this.error(
        this._trans.__('Cancelling Failed'),
        (error as RequestError).body
      );
    }
  }

  /**
   * Tell of a failure, with all that is known of it behind a button.
   *
   * @param title - the title of the dialog with the details
   * @param error - what went wrong
   * @param options - `prefix`: what to say before the error's own message;
   *   `id`: the notification to change instead of showing a new one
   */
  error(
    title: string,
    error: IErrorBody,
    options: { prefix?: string; id?: string } = {}
  ): void {
    const trans = this._trans;
    const explained = explain(error, trans);
    const { message, hint, details } = explained;
    const short = (options.prefix ?? '') + message;
    const whole = hint ? `${short} ${hint}` : short;
    const text = whole.length <= LONGEST_MESSAGE ? whole : short;
    const more = details || text !== whole || text.length > LONGEST_MESSAGE;
    show(options.id, text, 'error', {
      autoClose: false,
      actions: more ? [detailsAction(title, explained, trans)] : []
    });
  }

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
      ...(details ? [this._worthKnowing(message, details.split('\n'))] : []),
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
      isShort ? [] : [this._worthKnowing(message, from.warnings)]
    );
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
    const options = { autoClose: false as const, actions };
    const id = Notification.emit(message, 'warning', options);
    this._restores.set(kernelId, { ...said, id });
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

  private _ended(operation: IOperation, id: string): void {
    const trans = this._trans;
    const { kind, status, result, error } = operation;
    if (status === 'cancelled') {
      show(
        id,
        {
          save: trans.__(
            'Saving the kernel state was cancelled. The kernel runs on.'
          ),
          restore: trans.__(
            'Restoring was cancelled. The saved state is still there.'
          ),
          verify: trans.__('Verifying was cancelled.')
        }[kind],
        'info',
        { autoClose: SUCCESS_SHOWN, actions: [] }
      );
    } else if (status === 'failed' || !result) {
      this.error(
        {
          save: trans.__('Saving Kernel State Failed'),
          restore: trans.__('Restoring Kernel State Failed'),
          verify: trans.__('Verifying Kernel State Failed')
        }[kind],
        error ?? {
          message: trans.__('The operation failed.'),
          reason: 'internal',
          hint: null,
          details: null
        },
        { id }
      );
    } else if (result.verification) {
      this._verified(result.verification, id);
    } else {
      const size = formatSize(result.size);
      const seconds = formatSeconds(result.seconds);
      const message =
        kind === 'save'
          ? trans.__('Kernel state saved (%1 in %2)', size, seconds)
          : trans.__('Kernel state restored (%1 in %2)', size, seconds);
      const actions =
        result.warnings.length > 0
          ? [this._worthKnowing(message, result.warnings)]
          : [];
      const type = actions.length > 0 ? 'warning' : 'success';
      const autoClose = closesAfter(type);
      const now = show(id, message, type, { autoClose, actions });
      if (kind === 'restore') {
        const { kernel_id, state_id } = result;
        const before = this._restores.get(kernel_id);
        this._restores.set(kernel_id, {
          id: now,
          at: Date.now(),
          message,
          type,
          actions
        });
        if (before) {
          // Of an earlier restore, or of this one's gap, which was quicker.
          dismiss(before.id);
          if (before.gap?.stateId === state_id && isShown(before)) {
            before.gap.tell();
          }
        }
      }
    }
  }

  /** What a check found, where its dialog was closed before. */
  private _verified(found: IVerification, id: string): void {
    const trans = this._trans;
    const message = foundText(found, trans);
    if (found.intact) {
      const options = { autoClose: SUCCESS_SHOWN, actions: [] };
      show(id, message, 'success', options);
      return;
    }
    this.error(
      trans.__('Damaged Kernel State'),
      {
        message,
        reason: 'state_damaged',
        hint: found.older
          ? trans.__('An older state was read back too, and is whole.')
          : trans.__('No older state of this kernel is whole.'),
        details: lostTexts(found, trans).join('\n') || null
      },
      { id }
    );
  }

  private _worthKnowing(
    title: string,
    warnings: string[]
  ): Notification.IAction {
    const trans = this._trans;
    return detailsAction(
      title,
      {
        message: trans._n(
          'One thing is worth knowing:',
          'Some things are worth knowing:',
          warnings.length
        ),
        reason: 'warnings',
        hint: null,
        details: warnings.join('\n')
      },
      trans
    );
  }

  /** The last restore of each kernel that this page asked for. */
  private _asked = new Map<string, OperationFollower>();
  private _restores = new Map<string, IRestoreNotice>();
}

function isShown(notice: IRestoreNotice): boolean {
  return isDrawn(notice.id) || Date.now() - notice.at < DRAWING;
}

/** How long a notice of a type stays on screen. */
function closesAfter(type: 'success' | 'warning'): number | false {
  return type === 'success' ? SUCCESS_SHOWN : false;
}
