import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type {
  ContentsKind,
  IContents,
  IContentsSum,
  KernelStateAPI
} from '../api';
import { explain } from '../face';
import { formatPercent, formatSize } from '../format';
import type { IErrorBody, RequestError } from '../request';
import { errorLine } from '../texts';

/** A kind in a user's words. */
export function kindText(kind: ContentsKind, trans: TranslationBundle): string {
  switch (kind) {
    case 'anon':
      return trans.__('Anonymous memory');
    case 'python':
      return trans.__('Python heap');
    case 'libraries':
      return trans.__('Shared libraries');
    case 'shared':
      return trans.__('Shared memory');
    case 'gpu':
      return trans.__('GPU memory');
    case 'files':
      return trans.__('Files');
    default:
      return trans.__('Other');
  }
}

/** The kinds that there are any of, largest first. */
export function presentKinds(contents: IContents): IContentsSum[] {
  return contents.kinds
    .filter(sum => sum.size > 0)
    .sort((a, b) => b.size - a.size);
}

interface IBarProps {
  kinds: IContentsSum[];
  what: 'size' | 'new';
  /** What the whole width stands for, in bytes. */
  total: number;
}

/** Bytes by kind as one bar; the table below it says the same in words. */
function Bar(props: IBarProps): JSX.Element {
  const { kinds, what, total } = props;
  return (
    <div className="jp-gpu-ckpt-bar" aria-hidden="true">
      {kinds
        .filter(sum => sum[what] > 0)
        .map(sum => (
          <span
            key={sum.kind}
            className="jp-gpu-ckpt-bar-part"
            data-kind={sum.kind}
            style={{ width: `${(100 * sum[what]) / total}%` }}
          />
        ))}
    </div>
  );
}

interface IContentsProps {
  contents: IContents;
  trans: TranslationBundle;
}

function ContentsTable(props: IContentsProps): JSX.Element {
  const { contents, trans } = props;
  const kinds = presentKinds(contents);
  const total = Math.max(contents.size, 1);
  return (
    <div className="jp-gpu-ckpt-contents">
      <Bar kinds={kinds} what="size" total={total} />
      {contents.parent && <Bar kinds={kinds} what="new" total={total} />}
      <table>
        <caption className="jp-gpu-ckpt-hidden">
          {trans.__('What is in the state, by kind')}
        </caption>
        <thead>
          <tr>
            <th scope="col">{trans.__('Kind')}</th>
            <th scope="col">{trans.__('Size')}</th>
            <th scope="col">{trans.__('Share')}</th>
            {contents.parent && <th scope="col">{trans.__('New')}</th>}
          </tr>
        </thead>
        <tbody>
          {kinds.map(sum => (
            <tr key={sum.kind}>
              <th scope="row">
                <span
                  className="jp-gpu-ckpt-swatch"
                  data-kind={sum.kind}
                  aria-hidden="true"
                />
                {kindText(sum.kind, trans)}
              </th>
              <td>{formatSize(sum.size)}</td>
              <td>{formatPercent(sum.size / total)}</td>
              {contents.parent && <td>{formatSize(sum.new)}</td>}
            </tr>
          ))}
        </tbody>
      </table>
      {contents.parent && (
        <p>
          {trans.__(
            'New is what the state before it did not have: %1 in all, the lower bar.',
            formatSize(contents.new)
          )}
        </p>
      )}
    </div>
  );
}

export interface IStateContentsProps {
  stateId: string;
  api: KernelStateAPI;
  trans: TranslationBundle;
}

/** A disclosure that says what is in a state; read when it is opened. */
export function StateContents(props: IStateContentsProps): JSX.Element {
  const { stateId, api, trans } = props;
  const [contents, setContents] = React.useState<IContents | null>(null);
  const [error, setError] = React.useState<IErrorBody | null>(null);
  const [open, setOpen] = React.useState(false);

  React.useEffect(() => {
    let current = true;
    setContents(null);
    setError(null);
    if (open) {
      api
        .contents(stateId)
        .then(found => current && setContents(found))
        .catch(
          (failure: RequestError) =>
            current && setError(explain(failure.body, trans))
        );
    }
    return () => {
      current = false;
    };
  }, [stateId, open]);

  return (
    <details
      className="jp-gpu-ckpt-disclosure"
      onToggle={event => setOpen(event.currentTarget.open)}
    >
      <summary>{trans.__('Details')}</summary>
      {error && (
        // Not of the class that disables the buttons: it can be restored all the same.
        <p role="alert" className="jp-gpu-ckpt-error">
          {errorLine(error)}
        </p>
      )}
      {open && !error && !contents && (
        <p role="status">{trans.__('Reading…')}</p>
      )}
      {contents && <ContentsTable contents={contents} trans={trans} />}
    </details>
  );
}
