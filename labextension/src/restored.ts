import type { Kernel, ServerConnection } from '@jupyterlab/services';
import { KernelAPI } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

import { onEnded } from './ended';
import type { IKernelEvent } from './events';
import { wakeError } from './face';
import { formatAge } from './format';
import type { KernelStates } from './model';
import type { Notices } from './notices';
import { subject } from './notices';
import type { KernelPages } from './pages';
import { refreshStatus } from './pages';
import { PendingRequests, cellsOf } from './pending';
import { RememberedRestores } from './remembered';
import { operationTexts } from './texts';

/** How long a page may take to get a kernel that was restored for it, in milliseconds. */
const ATTACHING = 60_000;

/** When to read again whether a kernel woke for a page, in milliseconds. */
const WAKING = 3000;

/** The restores that were told of. */
const TOLD = new RememberedRestores('jupyter-gpu-ckpt:told-restores');

/**
 * Keeps the open pages true when a kernel was restored under them: by the
 * server after its death, or by a user of this or another page.
 */
export class RestoredKernels {
  constructor(private readonly _options: RestoredKernels.IOptions) {
    const { kernels, model, pages } = _options;
    this._pending = new PendingRequests(id => pages.ofKernel(id));
    model.operationStarted.connect((_, follower) =>
      this._pending.onOperationStarted(follower)
    );
    model.kernelEvent.connect((_, event) => {
      if (event.action === 'restored') {
        void this._onRestored(event);
      } else if (event.action === 'restore_failed') {
        this._onFailed(event);
      } else if (event.action === 'fenced') {
        this._onFenced(event);
      }
    });
    model.changed.connect((_, kernelId) => {
      this._onChanged(kernelId);
      this._lookWhetherItWoke(kernelId);
    });
    const known = () => [...this._asleep, ...this._unwoken];
    onEnded(kernels, known, kernelId => {
      this._asleep.delete(kernelId);
      this._goesOn(kernelId);
    });
    kernels.runningChanged.connect(() => {
      // It may have been restarted, of which no event tells.
      [...this._unwoken].forEach(kernelId => void model.refresh(kernelId));
    });
  }

  /** Tell once what is to be known of a kernel that came back unasked. */
  private _onChanged(kernelId: string): void {
    const { model, notices } = this._options;
    const from = model.entry(kernelId).kernel?.restored_from;
    const isUnasked = from?.cause === 'wake' || from?.cause === 'lost';
    if (!from || !isUnasked || from.warnings.length === 0) {
      return;
    }
    if (this._concerns(kernelId) && !TOLD.has(kernelId, from.restored)) {
      TOLD.add(kernelId, from.restored);
      if (!notices.restores.hasTold(kernelId, from)) {
        notices.restores.cameBack(kernelId, from);
      }
    }
  }

  /**
   * Tell that a hibernated kernel did not wake: what should have woken it may
   * have been a widget, or the page itself, which show nothing of it.
   */
  private _lookWhetherItWoke(kernelId: string): void {
    const { model, notices, pages } = this._options;
    const { kernel, error: refusal } = model.entry(kernelId);
    const error = kernel && wakeError(kernel);
    if (kernel?.execution_state !== 'hibernated') {
      this._asleep.delete(kernelId);
    } else if (!this._asleep.has(kernelId)) {
      // A page that has just been opened may not hear events yet.
      this._asleep.add(kernelId);
      window.setTimeout(() => {
        if (pages.ofKernel(kernelId).length > 0) {
          void model.refresh(kernelId);
        } else {
          this._asleep.delete(kernelId);
        }
      }, WAKING);
    }
    if (!error) {
      if (kernel || refusal?.reason === 'unknown_kernel') {
        // Not so where the server could not be asked.
        this._goesOn(kernelId);
      }
    } else if (!this._unwoken.has(kernelId) && this._concerns(kernelId)) {
      this._unwoken.add(kernelId);
      notices.notWoken(kernelId, error);
    }
  }

  /** A kernel woke, or is another process or none: that it did not wake is past. */
  private _goesOn(kernelId: string): void {
    if (this._unwoken.delete(kernelId)) {
      this._options.notices.forget(subject('restore', kernelId));
    }
  }

  private async _onRestored(event: IKernelEvent): Promise<void> {
    const { kernel_id, cause } = event;
    const { notices } = this._options;
    if (cause !== 'wake') {
      // What was sent to a hibernated kernel is delivered to it.
      this._pending.abandonUnknown(event);
    }
    this._runReplaced(event);
    notices.forget(subject('restore', kernel_id));
    refreshStatus(this._options.pages.ofKernel(kernel_id));
    if (cause === 'death' && this._concerns(kernel_id)) {
      await this._tell(event);
    }
  }

  /**
   * Run in a restored kernel what the server has kept from the fresh one that it
   * takes the place of: this page would not hear what the kernel says of it.
   */
  private _runReplaced({ kernel_id, path, held_msg_ids }: IKernelEvent): void {
    for (const page of this._options.pages.ofPath(path)) {
      const context = page.sessionContext;
      const has = () => context.session?.kernel?.id === kernel_id;
      const cells = cellsOf(page, held_msg_ids);
      if (cells.length > 0 && !has()) {
        const run = () => {
          if (has()) {
            context.kernelChanged.disconnect(run);
            window.clearTimeout(timer);
            void page.run(cells.filter(cell => !cell.isDisposed));
          }
        };
        // If it does not get the kernel, the cells say that they were not run.
        const timer = window.setTimeout(
          () => context.kernelChanged.disconnect(run),
          ATTACHING
        );
        context.kernelChanged.connect(run);
      }
    }
  }

  private _onFailed(event: IKernelEvent): void {
    const { notices, pages, trans } = this._options;
    const { kernel_id, cause, held_msg_ids, message } = event;
    if (cause === 'wake') {
      // The kernel is read anew, and says so itself then. Where cells of this
      // page should have woken it, they say why it did not.
      const answered = pages
        .ofKernel(kernel_id)
        .some(page => cellsOf(page, held_msg_ids).length > 0);
      if (answered) {
        this._unwoken.add(kernel_id);
        notices.forget(subject('restore', kernel_id));
      } else {
        this._unwoken.delete(kernel_id);
      }
    }
    // What the user asked for is answered by its operation.
    if (cause === 'death' && this._concerns(kernel_id)) {
      this._unwoken.delete(kernel_id);
      notices.error(
        operationTexts('restore', trans).failed,
        {
          message: message ?? trans.__('The cause is not known.'),
          reason: 'restore_failed',
          hint: null,
          details: null
        },
        {
          words: cause =>
            trans.__('The kernel died and could not be restored: %1', cause),
          about: subject('restore', kernel_id)
        }
      );
    }
  }

  /** Another server runs the kernel: what this page shows has no kernel any more. */
  private _onFenced({ kernel_id, message }: IKernelEvent): void {
    const { notices, trans } = this._options;
    if (this._concerns(kernel_id)) {
      this._unwoken.delete(kernel_id);
      notices.error(
        trans.__('Kernel Taken Over'),
        {
          message:
            message ?? trans.__('The kernel was taken over by another server.'),
          reason: 'fenced',
          hint: trans.__('Go on there, or start a new kernel here.'),
          details: null
        },
        { about: subject('restore', kernel_id) }
      );
    }
  }

  /** Whether this page is one that should tell of a kernel. */
  private _concerns(kernelId: string): boolean {
    const { everywhere, pages } = this._options;
    return everywhere || pages.ofKernel(kernelId).length > 0;
  }

  private async _tell(event: IKernelEvent): Promise<void> {
    const { model, notices, trans } = this._options;
    await model.refresh(event.kernel_id);
    const state = model.entry(event.kernel_id).kernel?.last_state;
    const created =
      state && (!event.state_id || state.id === event.state_id)
        ? state.created
        : await this._created(event.state_id);
    notices.restores.restored(
      event.kernel_id,
      created && formatAge(created, trans),
      event.message,
      () => void this._startFresh(event.kernel_id)
    );
  }

  private async _created(stateId: string | null): Promise<string | null> {
    try {
      return stateId
        ? (await this._options.model.api.state(stateId)).created
        : null;
    } catch {
      // Only the age is missing from the notice then.
      return null;
    }
  }

  private async _startFresh(kernelId: string): Promise<void> {
    const { notices, pages, serverSettings, trans } = this._options;
    const [page] = pages.ofKernel(kernelId);
    if (page) {
      await page.sessionContext.restartKernel();
      return;
    }
    try {
      await KernelAPI.restartKernel(kernelId, serverSettings);
    } catch (error) {
      notices.error(trans.__('Restarting the Kernel Failed'), {
        message: error instanceof Error ? error.message : String(error),
        reason: 'restart_failed',
        hint: null,
        details: null
      });
    }
  }

  private _pending: PendingRequests;
  /** Those that were hibernated when they were read last. */
  private _asleep = new Set<string>();
  /** Those that did not wake, of which the user knows. */
  private _unwoken = new Set<string>();
}

export namespace RestoredKernels {
  export interface IOptions {
    /** Whether this page tells of every kernel, not only of those it shows. */
    everywhere: boolean;
    kernels: Kernel.IManager;
    model: KernelStates;
    notices: Notices;
    pages: KernelPages;
    serverSettings: ServerConnection.ISettings;
    trans: TranslationBundle;
  }
}
