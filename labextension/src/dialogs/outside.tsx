import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IOutside, IOutsideConnection, IOutsideFile } from '../api';

/** So many connections are named where the state is described. */
const NAMED = 3;

function connectionText(
  connection: IOutsideConnection,
  trans: TranslationBundle
): string {
  const { protocol, port, service, incoming, count } = connection;
  if (protocol === 'unix') {
    return trans.__('service %1', connection.address);
  }
  const address = connection.address.includes(':')
    ? `[${connection.address}]`
    : connection.address;
  if (incoming) {
    return trans._n(
      'connection from %2 to port %3',
      '%1 connections from %2 to port %3',
      count,
      connection.address,
      port
    );
  }
  const peer = `${address}:${port}${service ? ` (${service})` : ''}`;
  return protocol === 'udp'
    ? trans.__('UDP service %1', peer)
    : trans._n('connection to %2', '%1 connections to %2', count, peer);
}

function fileText(file: IOutsideFile, trans: TranslationBundle): string {
  switch (file.mode) {
    case 'append':
      return trans.__('file %1 (appended to)', file.path);
    case 'map':
      return trans.__('file %1 (mapped)', file.path);
    default:
      return trans.__('file %1 (written)', file.path);
  }
}

/** The connections that a restore leaves closed. */
export function closedTexts(
  outside: IOutside | null,
  trans: TranslationBundle
): string[] {
  return (outside?.connections ?? [])
    .filter(connection => connection.protocol === 'tcp')
    .map(connection => connectionText(connection, trans));
}

/** What a restore opens again, and has to find. */
export function neededTexts(
  outside: IOutside | null,
  trans: TranslationBundle
): string[] {
  return [
    ...(outside?.connections ?? [])
      .filter(connection => connection.protocol !== 'tcp')
      .map(connection => connectionText(connection, trans)),
    ...(outside?.devices ?? []).map(path => trans.__('device %1', path)),
    ...(outside?.files ?? []).map(file => fileText(file, trans))
  ];
}

/** Whether a kernel had anything that is not in its state. */
export function hasOutside(outside: IOutside | null): boolean {
  return countOutside(outside) > 0;
}

function countOutside(outside: IOutside | null): number {
  return outside
    ? outside.connections.length +
        outside.devices.length +
        outside.files.length +
        outside.left_out
    : 0;
}

/** The connections that will not come back, in a line; `null` for none. */
export function closedLine(
  outside: IOutside | null,
  trans: TranslationBundle
): string | null {
  const closed = closedTexts(outside, trans);
  if (closed.length === 0) {
    return null;
  }
  const named = closed.slice(0, NAMED).join(', ');
  const more = closed.length - NAMED;
  return more > 0
    ? trans._n(
        'Will not come back: %2 and %1 more',
        'Will not come back: %2 and %1 more',
        more,
        named
      )
    : trans.__('Will not come back: %1', named);
}

export interface IOutsideProps {
  outside: IOutside | null;
  trans: TranslationBundle;
}

/** A disclosure that says what the kernel had that is not in the state. */
export function StateOutside(props: IOutsideProps): JSX.Element | null {
  const { outside, trans } = props;
  const closed = closedTexts(outside, trans);
  const needed = neededTexts(outside, trans);
  const more = outside?.left_out ?? 0;
  const count = countOutside(outside);
  if (count === 0) {
    return null;
  }
  return (
    <details className="jp-gpu-ckpt-disclosure jp-gpu-ckpt-outside">
      <summary>{trans.__('Not in the state (%1)', count)}</summary>
      {closed.length > 0 && (
        <Things title={trans.__('Will not come back:')} things={closed} />
      )}
      {needed.length > 0 && (
        <Things
          title={trans.__('Opened again as it is then, and has to be there:')}
          things={needed}
        />
      )}
      {more > 0 && <p>{trans.__('And %1 more.', more)}</p>}
    </details>
  );
}

function Things(props: { title: string; things: string[] }): JSX.Element {
  const id = React.useId();
  return (
    <>
      <p id={id}>{props.title}</p>
      <ul aria-labelledby={id}>
        {props.things.map((thing, key) => (
          <li key={key}>{thing}</li>
        ))}
      </ul>
    </>
  );
}
