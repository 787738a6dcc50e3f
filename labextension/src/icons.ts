import { LabIcon } from '@jupyterlab/ui-components';

import hibernatedSvg from '../style/icons/hibernated.svg';
import parkedSvg from '../style/icons/parked.svg';
import restoreSvg from '../style/icons/restore.svg';
import saveSvg from '../style/icons/save.svg';
import savedSvg from '../style/icons/saved.svg';
import unavailableSvg from '../style/icons/unavailable.svg';

/** A kernel whose state can be saved, or is being saved. */
export const saveIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:save',
  svgstr: saveSvg
});

/** A kernel with a saved state. */
export const savedIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:saved',
  svgstr: savedSvg
});

/** A kernel that was saved and stopped until it is needed. */
export const hibernatedIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:hibernated',
  svgstr: hibernatedSvg
});

/** A kernel whose GPU memory is in host memory. */
export const parkedIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:parked',
  svgstr: parkedSvg
});

/** A state that is or can be restored. */
export const restoreIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:restore',
  svgstr: restoreSvg
});

/** A kernel that cannot be saved. */
export const unavailableIcon = new LabIcon({
  name: 'jupyter-gpu-ckpt:unavailable',
  svgstr: unavailableSvg
});
