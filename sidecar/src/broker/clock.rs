//! The broker's clock, which its caller reads: the broker itself looks at no clock.

/// Milliseconds of a monotonic clock.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Millis(pub u64);

impl Millis {
    /// The time `millis` milliseconds later.
    #[must_use]
    pub fn after(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}
