//! Real threads on a heap link: small enough for Miri, which checks each access to the bytes.
