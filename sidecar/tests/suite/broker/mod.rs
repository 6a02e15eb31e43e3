//! The broker's rules one by one, each limit at the limit and one above, and attacks that it must refuse.

mod attacks;
mod limits;
mod rules;
mod town;
