import type { TranslationBundle } from '@jupyterlab/translation';
import { HTMLSelect } from '@jupyterlab/ui-components';
import * as React from 'react';

import type { GpuMap, IGpuHere, ISavedGpus } from '../api';
import { formatSize } from '../format';

export interface IGpusProps {
  gpu: ISavedGpus | null;
  /** What is chosen. */
  chosen: GpuMap;
  onChoose: (chosen: GpuMap) => void;
  trans: TranslationBundle;
}

/** Lets the user choose onto which GPUs a state is restored, where there are several. */
export function StateGpus(props: IGpusProps): JSX.Element | null {
  const { gpu, chosen, onChoose, trans } = props;
  const used = gpu?.gpus.filter(({ used }) => used) ?? [];
  if (!used.some(({ choices }) => choices.length > 1)) {
    return null;
  }
  return (
    <div
      className="jp-gpu-ckpt-gpus"
      role="group"
      aria-label={trans.__('GPUs to restore onto')}
    >
      {used.map(({ uuid, name, choices }, index) => (
        <label key={uuid} title={uuid}>
          <span>
            {used.length > 1
              ? trans.__('Restore GPU %1 (%2) onto', index + 1, name)
              : trans.__('Restore onto GPU')}
          </span>
          <HTMLSelect
            value={chosen[uuid] ?? ''}
            onChange={event => {
              const now = { ...chosen, [uuid]: event.target.value };
              if (!now[uuid]) {
                delete now[uuid];
              }
              onChoose(now);
            }}
          >
            <option value="">{trans.__('Automatic')}</option>
            {choices.map(here => (
              <option
                key={here.uuid}
                value={here.uuid}
                title={here.uuid}
                // One cannot stand for two.
                disabled={Object.entries(chosen).some(
                  ([old, taken]) => old !== uuid && taken === here.uuid
                )}
              >
                {hereText(here, trans)}
              </option>
            ))}
          </HTMLSelect>
        </label>
      ))}
    </div>
  );
}

function hereText(here: IGpuHere, trans: TranslationBundle): string {
  const { index, name, free } = here;
  return trans.__('GPU %1: %2, %3 free', index, name, formatSize(free));
}
