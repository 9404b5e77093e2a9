"""A ROS 2 node that runs vision-language-action policies; everything but `node` needs no ROS."""
