"""The embedded engine: a small inference server in plain torch that speaks a faithful subset of SGLang's HTTP API.

One process (`python -m miles.engines.embedded`), two threads:

    event loop (server)  --commands-->  scheduler thread (model, KV cache, weights)
                         <--updates---  one delivery per step

Only the scheduler thread touches the model, so weights change between two steps and never within one. Nothing is
imported here: the driver may import this package without paying for torch.
"""
