//! The sidecar of a pod. Nothing of it is built yet; `docs/architecture.md` says what it will be.
