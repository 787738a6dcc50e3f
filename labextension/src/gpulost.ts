import type { TranslationBundle } from '@jupyterlab/translation';

import type { ITarget } from './actions';
import { formatName } from './format';
import type { KernelStates } from './model';
import type { KernelPages } from './pages';
import { dismiss, show } from './toasts';

/**
 * Tells that a kernel's GPU is lost while the kernel lives on, and offers to
 * restore its last state: until it is another process.
 */
export class LostGpus {
  constructor(private readonly _options: LostGpus.IOptions) {
    const { everywhere, model, pages } = _options;
    model.changed.connect((_, kernelId) => {
      const { kernel } = model.entry(kernelId);
      if (kernel) {
        this._tell(kernelId, kernel.path, kernel.gpu_lost);
      }
    });
    // Of a kernel that no page shows there is nothing in the model.
    model.kernelEvent.connect((_, { action, kernel_id, path, message }) => {
      if (action === 'gpu_lost') {
        if (everywhere || pages.ofKernel(kernel_id).length > 0) {
          this._tell(kernel_id, path, message);
        }
      } else if (action === 'restored') {
        this._tell(kernel_id, path, null);
      }
    });
  }

  /** @param words - what is lost; `null`: nothing, or nothing any more */
  private _tell(
    kernelId: string,
    path: string | null,
    words: string | null
  ): void {
    const { restore, trans } = this._options;
    const before = this._told.get(kernelId);
    if (!words) {
      if (before) {
        this._told.delete(kernelId);
        dismiss(before);
      }
      return;
    }
    if (before) {
      return;
    }
    const message = path ? `${formatName(path, trans)}: ${words}` : words;
    const id = show(undefined, message, 'warning', {
      autoClose: false,
      actions: [
        {
          label: trans.__('Restore Kernel State…'),
          caption: trans.__(
            'Choose one of its saved states; it comes back on another GPU where there is one'
          ),
          callback: () => restore({ kernelId, path })
        }
      ]
    });
    this._told.set(kernelId, id);
  }

  /** The notifications, by the kernel. */
  private _told = new Map<string, string>();
}

export namespace LostGpus {
  export interface IOptions {
    /** Whether this page tells of every kernel, not only of those it shows. */
    everywhere: boolean;
    model: KernelStates;
    pages: KernelPages;
    restore: (target: ITarget) => void;
    trans: TranslationBundle;
  }
}
