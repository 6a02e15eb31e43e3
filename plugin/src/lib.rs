//! The node's device plugin. Nothing of it is built yet.
//!
//! It will run once per node, advertise shared memory and named pools to the kubelet as resources, and answer the kubelet's
//! Allocate with mounts and environment. It decides that a container may join; it is not on the path of a message. Beside it
//! will stand the identity service, which tells a sidecar which process is at the other end of a socket.
