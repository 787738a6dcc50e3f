import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette, ISessionContext } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type {
  ReadonlyJSONObject,
  ReadonlyPartialJSONObject
} from '@lumino/coreutils';

import type { Actions, ITarget } from './actions';
import { showDetails } from './dialogs/details';
import { faceOf } from './face';
import { hibernatedIcon, parkedIcon, restoreIcon, saveIcon } from './icons';
import type { LostKernels } from './lost';
import type { KernelStates } from './model';

export namespace CommandIDs {
  export const save = 'gpu-ckpt:save';
  export const hibernate = 'gpu-ckpt:hibernate';
  export const park = 'gpu-ckpt:park';
  export const unpark = 'gpu-ckpt:unpark';
  export const restore = 'gpu-ckpt:restore';
  export const showLost = 'gpu-ckpt:show-lost';
}

/** The class of a kernel in the Running panel. */
const RUNNING_KERNEL_CLASS = 'jp-mod-kernel';

interface IOptions {
  actions: Actions;
  app: JupyterFrontEnd;
  lost: LostKernels;
  model: KernelStates;
  palette: ICommandPalette | null;
  trans: TranslationBundle;
}

/** Add the commands; `schema/plugin.json` puts them into the menus. */
export function addCommands(options: IOptions): void {
  const { actions, app, lost, model, palette, trans } = options;
  const { commands } = app;

  const target = (args: ReadonlyPartialJSONObject): ITarget => {
    if (typeof args.kernelId === 'string' || typeof args.path === 'string') {
      return {
        kernelId: (args.kernelId as string) ?? null,
        path: (args.path as string) ?? null
      };
    }
    return args.runningPanel ? contextTarget(app) : currentTarget(app);
  };

  commands.addCommand(CommandIDs.save, {
    label: trans.__('Save Kernel State'),
    caption: trans.__(
      'Save the kernel with everything in it, to restore it later or elsewhere'
    ),
    icon: args => (args.runningPanel ? saveIcon : undefined),
    describedBy: { args: argsSchema(trans) },
    isEnabled: args => !!target(args).kernelId,
    execute: async args => {
      const { kernelId } = target(args);
      if (!kernelId) {
        return;
      }
      await model.refresh(kernelId);
      const { error } = faceOf(model.entry(kernelId), trans);
      if (error) {
        await showDetails(trans.__('Cannot Save Kernel State'), error, trans);
      } else {
        await actions.save(kernelId);
      }
    }
  });

  commands.addCommand(CommandIDs.hibernate, {
    label: trans.__('Hibernate Kernel'),
    caption: trans.__(
      'Save the kernel and free its memory; it wakes by itself when a cell is run'
    ),
    icon: args => (args.runningPanel ? hibernatedIcon : undefined),
    describedBy: { args: argsSchema(trans) },
    isEnabled: args => {
      const { kernelId } = target(args);
      const state = kernelId && model.entry(kernelId).kernel?.execution_state;
      return !!kernelId && state !== 'hibernated';
    },
    execute: async args => {
      const { kernelId } = target(args);
      if (kernelId) {
        await actions.hibernate(kernelId);
      }
    }
  });

  /** `undefined` for a kernel that no page shows. */
  const known = (args: ReadonlyPartialJSONObject) =>
    model.entry(target(args).kernelId ?? '').kernel ?? undefined;

  commands.addCommand(CommandIDs.park, {
    label: trans.__('Park GPU'),
    caption: trans.__(
      'Move what the kernel has on its GPU to host memory; it comes back by itself when a cell is run'
    ),
    icon: args => (args.runningPanel ? parkedIcon : undefined),
    describedBy: { args: argsSchema(trans) },
    // Of a kernel in the Running panel that no page shows it is not known.
    isVisible: args => {
      const kernel = known(args);
      return kernel
        ? kernel.can_park && !kernel.parked
        : !!args.runningPanel && model.hasGpu;
    },
    isEnabled: args => {
      const { kernelId } = target(args);
      const kernel = known(args);
      // Whether it uses a GPU, and can be parked, the server says.
      return (
        !!kernelId &&
        !kernel?.parked &&
        kernel?.savable !== false &&
        kernel?.execution_state !== 'hibernated'
      );
    },
    execute: async args => {
      const { kernelId } = target(args);
      if (kernelId) {
        await actions.park(kernelId);
      }
    }
  });

  // Of a kernel in the Running panel that no page shows, either may be so.
  const mayBeParked = (args: ReadonlyPartialJSONObject) => {
    const kernel = known(args);
    return kernel ? !!kernel.parked : !!args.runningPanel && model.hasGpu;
  };

  commands.addCommand(CommandIDs.unpark, {
    label: trans.__('Unpark GPU'),
    caption: trans.__('Give the parked kernel its GPU back now'),
    icon: args => (args.runningPanel ? parkedIcon : undefined),
    describedBy: { args: argsSchema(trans) },
    isVisible: mayBeParked,
    isEnabled: args =>
      !!target(args).kernelId && (!!args.kernelId || mayBeParked(args)),
    execute: async args => {
      const { kernelId } = target(args);
      if (kernelId) {
        await actions.unpark(kernelId);
      }
    }
  });

  commands.addCommand(CommandIDs.restore, {
    label: trans.__('Restore Kernel State…'),
    caption: trans.__('Choose one of the saved states of this notebook'),
    icon: args => (args.runningPanel ? restoreIcon : undefined),
    describedBy: { args: argsSchema(trans) },
    isEnabled: args => {
      const { kernelId, path } = target(args);
      return !!kernelId || !!path;
    },
    execute: args => actions.restore(target(args))
  });

  commands.addCommand(CommandIDs.showLost, {
    label: trans.__('Restore Lost Kernels…'),
    caption: trans.__(
      'Show the kernels that ended with their server or node and can be restored'
    ),
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => lost.show()
  });

  const refresh = () => {
    commands.notifyCommandChanged(CommandIDs.save);
    commands.notifyCommandChanged(CommandIDs.hibernate);
    commands.notifyCommandChanged(CommandIDs.park);
    commands.notifyCommandChanged(CommandIDs.unpark);
    commands.notifyCommandChanged(CommandIDs.restore);
  };
  app.shell.currentChanged?.connect(refresh);
  model.changed.connect(refresh);

  const category = trans.__('Kernel Operations');
  for (const command of Object.values(CommandIDs)) {
    palette?.addItem({ command, category, args: { isPalette: true } });
  }
}

/** What a widget with a kernel has: notebooks, consoles. */
interface IKernelWidget {
  sessionContext?: ISessionContext;
}

/** The kernel and notebook of the page in front. */
function currentTarget(app: JupyterFrontEnd): ITarget {
  const widget = app.shell.currentWidget as IKernelWidget | null;
  const context = widget?.sessionContext;
  return {
    kernelId: context?.session?.kernel?.id ?? null,
    path: context?.path ?? null
  };
}

/** The kernel in the Running panel whose context menu is open. */
function contextTarget(app: JupyterFrontEnd): ITarget {
  const node = app.contextMenuHitTest(item =>
    item.classList.contains(RUNNING_KERNEL_CLASS)
  );
  return { kernelId: node?.dataset.context || null, path: null };
}

function argsSchema(trans: TranslationBundle): ReadonlyJSONObject {
  return {
    type: 'object',
    properties: {
      kernelId: {
        type: 'string',
        description: trans.__('The kernel; by default the current one')
      },
      path: {
        type: 'string',
        description: trans.__('The notebook whose states to restore')
      },
      runningPanel: {
        type: 'boolean',
        description: trans.__(
          'Whether to take the kernel whose context menu is open'
        )
      }
    }
  };
}
