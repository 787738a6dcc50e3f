import { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type {
  IOperation,
  IVerification,
  KernelStateAPI,
  OperationKind
} from './api';
import { foundText, lostTexts } from './dialogs/check';
import { detailsAction, worthKnowing } from './dialogs/details';
import { explain } from './face';
import type { OperationFollower } from './follower';
import { formatPercent, formatSeconds, formatSize } from './format';
import type { IErrorBody, RequestError } from './request';
import { isRefusal } from './request';
import { RestoreNotices } from './restorenotices';
import { errorLine, operationTexts, waitText } from './texts';
import { LONGEST_MESSAGE, closesAfter, dismiss, isDrawn, show } from './toasts';

/** What an operation is about: of one thing only the last end is told. */
function subjectOf({ kind, kernel_id, state_id }: IOperation): string {
  // Of each state it is worth knowing whether it is whole.
  return subject(kind, kind === 'verify' ? (state_id ?? '') : kernel_id);
}

/** What is tried with a kernel: parking it, say. */
export function subject(kind: OperationKind, id: string): string {
  return `${kind === 'unpark' ? 'park' : kind} ${id}`;
}

/** Tells the user how operations go and end. */
export class Notices {
  constructor(
    private readonly _api: KernelStateAPI,
    private readonly _trans: TranslationBundle
  ) {
    this.restores = new RestoreNotices(_trans);
  }

  /** What is said of restored kernels. */
  readonly restores: RestoreNotices;

  /**
   * Show an operation from its start to its end.
   *
   * @returns the operation at its end; never rejects
   */
  async follow(follower: OperationFollower): Promise<IOperation> {
    const trans = this._trans;
    const { operation } = follower;
    const text = operationTexts(operation.kind, trans).going;
    this.forget(subjectOf(operation));
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
    follower.changed.connect((_, current) => {
      const { progress } = current;
      // An update would bring back a notification that the user has hidden.
      if (isDrawn(id)) {
        const waits = waitText(current, trans);
        const message = waits ?? `${text} ${formatPercent(progress)}`;
        Notification.update({ id, message, progress });
      }
    });
    if (operation.kind === 'restore') {
      this.restores.asked(follower);
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
   * Tell of a failure, with all that is known of it behind a button; of what is
   * only refused it is told as a warning.
   *
   * @param title - the title of the dialog with the details
   * @param error - what went wrong
   * @param options - `words`: makes what is told of the error's own message;
   *   `id`: the notification to change instead of showing a new one; `about`:
   *   see {@link subject}, an earlier one about the same goes
   */
  error(
    title: string,
    error: IErrorBody,
    options: {
      words?: (message: string) => string;
      id?: string;
      about?: string;
    } = {}
  ): void {
    const { about, words } = options;
    const trans = this._trans;
    const explained = explain(error, trans);
    const { message, details } = explained;
    const short = words ? words(message) : message;
    const whole = errorLine({ ...explained, message: short });
    const text = whole.length <= LONGEST_MESSAGE ? whole : short;
    const more = details || text !== whole || text.length > LONGEST_MESSAGE;
    if (about) {
      this.forget(about);
    }
    const type = isRefusal(error) ? 'warning' : 'error';
    const id = show(options.id, text, type, {
      autoClose: false,
      actions: more ? [detailsAction(title, explained, trans)] : []
    });
    if (about) {
      this._told.set(about, id);
    }
  }

  /**
   * Tell that a hibernated kernel did not wake. A widget may try it again with
   * each move: that changes the notice that is there.
   */
  notWoken(kernelId: string, error: IErrorBody): void {
    const about = subject('restore', kernelId);
    const id = this._told.get(about);
    this._told.delete(about);
    const title = this._trans.__('Waking the Kernel Failed');
    this.error(title, error, { id, about });
  }

  /**
   * Tell of what nobody has asked for and nobody has to do something about: it
   * goes by itself, and stays among JupyterLab's notifications.
   */
  quiet(title: string, kernelId: string, error: IErrorBody): void {
    const { message } = error;
    const about = subject('park', kernelId);
    this.forget(about);
    const id = show(undefined, message, 'info', {
      autoClose: closesAfter('info'),
      actions: [detailsAction(title, error, this._trans)]
    });
    this._told.set(about, id);
  }

  /** What was told about something counts no longer: see {@link subject}. */
  forget(about: string): void {
    const id = this._told.get(about);
    if (id !== undefined) {
      this._told.delete(about);
      dismiss(id);
    }
  }

  private _ended(operation: IOperation, id: string): void {
    const trans = this._trans;
    const { kind, status, result, error } = operation;
    const texts = operationTexts(kind, trans);
    const about = subjectOf(operation);
    if (status === 'cancelled') {
      const autoClose = closesAfter('info');
      show(id, texts.cancelled, 'info', { autoClose, actions: [] });
    } else if (status === 'failed' || !result) {
      this.error(
        texts.failed,
        error ?? {
          message: trans.__('The operation failed.'),
          reason: 'internal',
          hint: null,
          details: null
        },
        { id, about }
      );
    } else if (result.verification) {
      this._verified(result.verification, id, about);
    } else {
      const message = texts.done(
        formatSize(result.size),
        formatSeconds(result.seconds)
      );
      const actions =
        result.warnings.length > 0
          ? [worthKnowing(message, result.warnings, trans)]
          : [];
      const type = actions.length > 0 ? 'warning' : 'success';
      const autoClose = closesAfter(type);
      const now = show(id, message, type, { autoClose, actions });
      if (kind === 'restore') {
        this.restores.ended(result, { id: now, message, type, actions });
      } else {
        this._told.set(about, now);
      }
    }
  }

  /** What a check found, where its dialog was closed before. */
  private _verified(found: IVerification, id: string, about: string): void {
    const trans = this._trans;
    const message = foundText(found, trans);
    if (found.intact) {
      const options = { autoClose: closesAfter('success'), actions: [] };
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
      { id, about }
    );
  }

  /** The notifications of what ended last, by what they are about. */
  private _told = new Map<string, string>();
}
