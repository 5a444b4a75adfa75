"""`primerl serve --tinker`: the Tinker API on a machine of one's own, over primerl's trainer and engines.

| module | what |
|---|---|
| `serve` | the process: checks, starts engines, listens, stops |
| `untied` | the base model as engines load it: with an output layer of its own |
| `routes`, `state_routes` | HTTP: paths, key, answers; no work is done here |
| `page`, `history` | the server's page, and what it shows of the past |
| `service` | sessions, training and sampling clients: what each call means |
| `futures` | promises: order of calls, retries, long polls |
| `wire` | the SDK's protobuf messages, from and to tensors |
| `losses` | the losses, which are sums over tokens |
| `clients` | training clients: adapters over one base model |
| `store`, `export` | saved states on disk, and their files for download |
| `engines` | engine processes, and which weights each has proved |
| `sampling`, `generation` | a request for samples, from and to an engine's |
| `scoring` | scores of a prompt that the trainer computes, as engines do not have them |

Facts about the API were measured against SDK 0.38; it ships its protobuf messages, which `wire` uses.
"""
