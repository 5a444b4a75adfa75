"""`primerl serve --tinker`: the Tinker API on a machine of one's own, over primerl's trainer and engines.

| module | what |
|---|---|
| `serve` | the process: checks, starts engines, listens, stops |
| `routes` | HTTP: paths, key, answers; no work is done here |
| `service` | sessions, training and sampling clients: what each call means |
| `futures` | promises: order of calls, retries, long polls |
| `wire` | the SDK's protobuf messages, from and to tensors |
| `losses` | the losses, which are sums over tokens |
| `clients` | training clients: adapters over one base model |
| `store` | saved states on disk |
| `engines` | engine processes, and which weights each has proved |
| `sampling` | a request for samples, from and to an engine's |

Facts about the API were measured against SDK 0.38; it ships its protobuf messages, which `wire` uses.
"""
