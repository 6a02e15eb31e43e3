//! End-to-end tests on a cluster. None exist yet; they come with the chart in `helm/`.
