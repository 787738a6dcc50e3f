import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { ServiceManager } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { GpuMap, ILostKernel, KernelStateAPI } from './api';
import { showLostDialog } from './dialogs/lost';
import type { KernelStates } from './model';
import type { Notices } from './notices';
import { subject } from './notices';
import type { KernelPages } from './pages';
import { adoptRestored, attachPages } from './pages';
import type { RequestError } from './request';
import { operationTexts } from './texts';

/** Asks whether to restore kernels that ended with their server or node. */
export class LostKernels {
  constructor(private readonly _options: LostKernels.IOptions) {
    _options.model.kernelEvent.connect((_, event) => {
      if (event.action === 'lost') {
        void this.check();
      } else if (event.action === 'restored' && event.cause === 'lost') {
        void this.adopt();
      }
    });
  }

  /**
   * Let open pages go on with kernels that were restored unasked, or that
   * another page asked for.
   */
  async adopt(): Promise<void> {
    const { model, pages, serviceManager } = this._options;
    try {
      await adoptRestored(pages, serviceManager.sessions, async kernelId => {
        await model.refresh(kernelId);
        return model.entry(kernelId).kernel?.restored_from?.cause === 'lost';
      });
    } catch {
      // The server is away again: this is done anew when it is back.
    }
  }

  /**
   * Ask about lost kernels that this page has not asked about yet.
   *
   * Stays silent where there are none, where the user switched the prompt
   * off, and where the server does not answer.
   */
  async check(): Promise<void> {
    const { api, enabled, everywhere, pages } = this._options;
    if (!enabled()) {
      return;
    }
    let kernels: ILostKernel[];
    try {
      kernels = await api.lost();
    } catch {
      return;
    }
    const news = kernels.filter(
      kernel =>
        !this._asked.has(kernel.kernel_id) &&
        (everywhere || pages.ofPath(kernel.path).length > 0)
    );
    if (news.length > 0) {
      await this._ask(news);
    }
  }

  /** Show all lost kernels, also those asked about before. */
  async show(): Promise<void> {
    const { api, notices, trans } = this._options;
    let kernels: ILostKernel[];
    try {
      kernels = await api.lost();
    } catch (error) {
      notices.error(
        trans.__('Reading the Lost Kernels Failed'),
        (error as RequestError).body
      );
      return;
    }
    if (kernels.length > 0) {
      await this._ask(kernels);
    } else {
      await showDialog({
        title: trans.__('Restore Lost Kernels'),
        body: trans.__('No kernel was lost.'),
        buttons: [Dialog.cancelButton({ label: trans.__('Close') })]
      });
    }
  }

  private async _ask(kernels: ILostKernel[]): Promise<void> {
    // Remembered before the answer: an event must not open a second prompt.
    kernels.forEach(kernel => this._asked.add(kernel.kernel_id));
    const { api, trans } = this._options;
    const read = (stateId: string) => api.state(stateId);
    const choice = await showLostDialog(kernels, read, trans);
    if (choice?.action === 'restore') {
      const { gpuMaps } = choice;
      await Promise.all(
        choice.kernels.map(kernel =>
          this._restore(kernel, gpuMaps.get(kernel.kernel_id) ?? {})
        )
      );
    } else if (choice?.action === 'dismiss') {
      await Promise.all(choice.kernels.map(kernel => this._dismiss(kernel)));
    }
  }

  private async _restore(kernel: ILostKernel, gpuMap: GpuMap): Promise<void> {
    const { api, model, notices, openPath, pages, serviceManager, trans } =
      this._options;
    let operation;
    try {
      operation = await api.restoreLost(kernel.kernel_id, gpuMap);
    } catch (error) {
      this._asked.delete(kernel.kernel_id);
      notices.error(
        operationTexts('restore', trans).failed,
        (error as RequestError).body,
        { about: subject('restore', kernel.kernel_id) }
      );
      return;
    }
    const final = await notices.follow(model.follow(operation));
    if (!final.result) {
      this._asked.delete(kernel.kernel_id);
      if (final.error?.reason === 'state_damaged') {
        // An older state is offered now, if there is one.
        await this.check();
      }
      return;
    }
    const path = kernel.path;
    const attached = await attachPages(
      pages,
      serviceManager.sessions,
      path,
      final.result.kernel_id
    );
    if (path && !attached) {
      await openPath(path);
    }
  }

  private async _dismiss(kernel: ILostKernel): Promise<void> {
    const { api, notices, trans } = this._options;
    try {
      await api.dismissLost(kernel.kernel_id);
    } catch (error) {
      notices.error(
        trans.__('Dismissing Failed'),
        (error as RequestError).body
      );
    }
  }

  private _asked = new Set<string>();
}

export namespace LostKernels {
  export interface IOptions {
    api: KernelStateAPI;
    /** Whether the user wants to be asked. */
    enabled: () => boolean;
    /** Whether this page asks about every kernel, not only its own. */
    everywhere: boolean;
    model: KernelStates;
    notices: Notices;
    /** Open what a restored kernel belongs to, where the page can. */
    openPath: (path: string) => Promise<void>;
    pages: KernelPages;
    serviceManager: ServiceManager.IManager;
    trans: TranslationBundle;
  }
}
