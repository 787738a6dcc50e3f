import type {
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ILabShell } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { IConsoleTracker } from '@jupyterlab/console';
import { PageConfig } from '@jupyterlab/coreutils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator } from '@jupyterlab/translation';

import { Actions } from './actions';
import { KernelStateAPI } from './api';
import { SaveButtonWidget } from './button';
import { addCommands } from './commands';
import { onEnded } from './ended';
import { Endings } from './endings';
import { Gaps } from './gaps';
import { LostGpus } from './gpulost';
import { LostKernels } from './lost';
import { KernelStates } from './model';
import { Notices } from './notices';
import { KernelPages } from './pages';
import { ReconnectWatcher } from './reconnect';
import { RestoredKernels } from './restored';
import { UnaskedParks } from './unasked';

const PLUGIN_ID = 'jupyter-gpu-ckpt:plugin';

/**
 * When to look for lost kernels again after the server came back, in
 * milliseconds: the page may be there before the server knows what was lost.
 */
const LATE_CHECKS = [5000, 20_000];

const plugin: JupyterFrontEndPlugin<void> = {
  id: PLUGIN_ID,
  description: 'Saves and restores the live state of kernels.',
  autoStart: true,
  requires: [INotebookTracker, ITranslator],
  optional: [
    ICommandPalette,
    IConsoleTracker,
    ILabShell,
    ISettingRegistry,
    IToolbarWidgetRegistry
  ],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    translator: ITranslator,
    palette: ICommandPalette | null,
    consoles: IConsoleTracker | null,
    labShell: ILabShell | null,
    settingRegistry: ISettingRegistry | null,
    toolbarRegistry: IToolbarWidgetRegistry | null
  ) => {
    const { commands, serviceManager } = app;
    const { kernels, serverSettings } = serviceManager;
    const trans = translator.load('jupyter_gpu_ckpt');
    const api = new KernelStateAPI(serverSettings);
    const model = new KernelStates({ api, events: serviceManager.events });
    const notices = new Notices(api, trans);
    const pages = new KernelPages(tracker, consoles);
    onEnded(
      kernels,
      () => model.kernelIds,
      kernelId => {
        if (pages.ofKernel(kernelId).length === 0) {
          model.forget(kernelId);
        }
      }
    );
    const actions = new Actions({
      api,
      commands,
      model,
      notices,
      pages,
      serviceManager,
      trans
    });

    // JupyterLab is one page for all notebooks. Of Notebook 7's pages, the
    // file list speaks for all kernels and a notebook for its own.
    const isLab = labShell !== null;
    const isTree = PageConfig.getOption('notebookPage') === 'tree';

    let settings: ISettingRegistry.ISettings | null = null;
    const settingsLoaded = settingRegistry
      ?.load(PLUGIN_ID)
      .then(loaded => {
        settings = loaded;
      })
      .catch(reason => {
        console.error(`Failed to load settings for ${PLUGIN_ID}.`, reason);
      });

    new RestoredKernels({
      everywhere: isLab,
      kernels,
      model,
      notices,
      pages,
      serverSettings,
      trans
    });
    new Gaps({ model, notices: notices.restores, pages, trans });
    new UnaskedParks({ kernels, model, notices, trans });
    new LostGpus({
      everywhere: isLab,
      kernels,
      model,
      pages,
      restore: target => void actions.restore(target),
      trans
    });
    new Endings({ model, trans });
    const lost = new LostKernels({
      api,
      enabled: () => settings?.get('showRestorePrompt').composite !== false,
      everywhere: isLab || isTree,
      model,
      notices,
      openPath: async path => {
        // A tab that Notebook 7 opens without a click would be blocked.
        if (isLab) {
          const isNotebook = path.endsWith('.ipynb');
          const command = isNotebook ? 'docmanager:open' : 'console:open';
          await commands.execute(command, { path });
        }
      },
      pages,
      serviceManager,
      trans
    });

    addCommands({ actions, app, lost, model, palette, trans });

    toolbarRegistry?.addFactory<NotebookPanel>(
      'Notebook',
      'save-kernel-state',
      panel =>
        new SaveButtonWidget({
          sessionContext: panel.sessionContext,
          model,
          trans,
          onClick: (kernelId, face) => void actions.click(kernelId, face)
        })
    );

    const watcher = new ReconnectWatcher(serviceManager, pages, () =>
      api.lost()
    );
    watcher.reconnected.connect(() => {
      void model.refreshAll();
      const look = () => {
        void lost.check();
        void lost.adopt();
      };
      look();
      LATE_CHECKS.forEach(delay => window.setTimeout(look, delay));
    });

    void Promise.all([app.restored, settingsLoaded]).then(() => {
      void lost.check();
      if (!isLab && !isTree) {
        pages.forEachContext(() => void lost.check());
      }
    });
  }
};

export default plugin;
