import type { Kernel } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { ITarget } from './actions';
import { onEnded } from './ended';
import { formatName } from './format';
import type { KernelStates } from './model';
import type { KernelPages } from './pages';
import { dismiss, show } from './toasts';

/** That a GPU of a kernel is lost. */
interface ILoss {
  path: string | null;
  /** What is lost, in the server's words. */
  words: string;
  /** Whether the kernel has a saved state. */
  isSaved: boolean;
}

/**
 * Tells that a kernel's GPU is lost while the kernel lives on, and offers to
 * restore a state of it, if it has one: until it is another process, or none.
 */
export class LostGpus {
  constructor(private readonly _options: LostGpus.IOptions) {
    const { everywhere, kernels, model, pages } = _options;
    model.changed.connect((_, kernelId) => this._onChanged(kernelId));
    // Of a kernel that no page shows there may be nothing in the model.
    model.kernelEvent.connect((_, event) => {
      const { action, kernel_id, path, message, state_id } = event;
      if (action === 'gpu_lost') {
        if (message && (everywhere || pages.ofKernel(kernel_id).length > 0)) {
          // Each loss is told of once: what stands there was of another process.
          const isSaved = state_id !== null;
          this._tell(kernel_id, { path, words: message, isSaved });
        }
      } else if (action === 'restored') {
        this._takeBack(kernel_id);
      }
    });
    const told = () => this._told.keys();
    onEnded(kernels, told, kernelId => this._takeBack(kernelId));
    kernels.runningChanged.connect(() => {
      // It may have been restarted, of which no event tells.
      [...told()].forEach(kernelId => void model.refresh(kernelId));
    });
  }

  private _onChanged(kernelId: string): void {
    const { kernel, error } = this._options.model.entry(kernelId);
    if (kernel?.gpu_lost) {
      const { gpu_lost: words, last_state, path } = kernel;
      if (this._told.get(kernelId)?.words !== words) {
        this._tell(kernelId, { path, words, isSaved: last_state !== null });
      }
    } else if (kernel || error?.reason === 'unknown_kernel') {
      // Not so where the server could not be asked.
      this._takeBack(kernelId);
    }
  }

  /** Tell of a loss, in the place of what was told of the kernel before. */
  private _tell(kernelId: string, { path, words, isSaved }: ILoss): void {
    const { restore, trans } = this._options;
    const message = path ? `${formatName(path, trans)}: ${words}` : words;
    const offer = {
      label: trans.__('Restore Kernel State…'),
      caption: trans.__(
        'Choose one of its saved states; it comes back on another GPU where there is one'
      ),
      callback: () => restore({ kernelId, path })
    };
    const id = show(this._told.get(kernelId)?.id, message, 'warning', {
      autoClose: false,
      actions: isSaved ? [offer] : []
    });
    this._told.set(kernelId, { id, words });
  }

  private _takeBack(kernelId: string): void {
    const told = this._told.get(kernelId);
    if (told) {
      this._told.delete(kernelId);
      dismiss(told.id);
    }
  }

  /** The notifications and what they say, by the kernel. */
  private _told = new Map<string, { id: string; words: string }>();
}

export namespace LostGpus {
  export interface IOptions {
    /** Whether this page tells of every kernel, not only of those it shows. */
    everywhere: boolean;
    kernels: Kernel.IManager;
    model: KernelStates;
    pages: KernelPages;
    restore: (target: ITarget) => void;
    trans: TranslationBundle;
  }
}
